"""Sub-groups on their way between a disk and memory while a walk steps them one after another.

    walk 1    0  1  2  3  4  5      reads each of them, writes 0 to 3; 4 and 5 stay in their buffers, and are not written
    walk 2    5  4  3  2  1  0      the other way round, so those need no read; 5 to 2 are written, 1 and 0 stay

    buffer a  | step i   | write i       | read i+3 ...
    buffer b  | read i+1 | step i+1      | write i+1 ...
    buffer c  | write i-1 | read i+2     | step i+2 ...

A run is the bytes of one sub-group; where its parts lie in files and in a buffer is told by the caller, anew each time,
because state may come to exist. A run is written when its buffer is needed for another one, which is known as soon as it was
stepped: as many are written as are still to be read. What stays is newer than the files until `settle` writes it.

[Note: torn] When a read or write fails, or a step raises, some runs are stepped and others are not. Buffers are then
emptied; that the files are of no use any more is the caller's to remember. Between walks a write that fails loses nothing:
the buffer keeps the run, and the next `settle` tries again.

Does not live here: what runs hold (`zero.disk_residence`, the caller), how many and how large (`sub_groups`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from deepspeed.errors import FileIoError
from deepspeed.ops.aio.engine import IoEngine, IoFile, IoRequest, aligned_empty

__all__ = ["Move", "RunBuffers"]


class Move(NamedTuple):
    """`nbytes` at `file_start` of a file, and at `buffer_start` of a buffer."""

    file: IoFile
    file_start: int
    buffer_start: int
    nbytes: int

    def overlaps(self, file: IoFile, start: int, stop: int) -> bool:
        """Whether it has bytes of `[start, stop)` of `file`."""
        return self.file is file and self.file_start < stop and start < self.file_start + self.nbytes


Moves = Callable[[int], Sequence[Move]]
"""Number of a run -> what is moved of it."""

Choice = Callable[[int], bool]
"""Number of a run -> whether it is meant."""


def _every(run: int) -> bool:
    return True


class _Buffer:
    """Memory for one run at a time.

    Attributes:
        memory: of the run.
        run: what it holds, or is being filled with.
        is_newer: than the files.
    """

    def __init__(self, nbytes: int, *, is_pinned: bool) -> None:
        self.memory = aligned_empty(nbytes, is_pinned=is_pinned)
        self.run: int | None = None
        self.is_newer = False
        self._requests: list[IoRequest] = []

    @property
    def is_under_way(self) -> bool:
        """Whether something was started that nobody has waited for."""
        return bool(self._requests)

    @property
    def is_still(self) -> bool:
        """Whether nothing moves in or out."""
        return all(request.is_done for request in self._requests)

    def start(self, requests: list[IoRequest]) -> None:
        """Remember what moves: out of it where it is newer, else in."""
        self._requests = requests

    def wait(self) -> None:
        """Block until nothing moves. Where something has failed, what is newer stays so."""
        requests, self._requests = self._requests, []
        errors = [error for request in requests if (error := _error_of(request)) is not None]
        if errors:
            raise errors[0]
        if requests:
            self.is_newer = False

    def empty(self) -> None:
        """Wait for what moves, whatever becomes of it, and forget the run."""
        with suppress(FileIoError):  # of bytes that nobody wants any more
            self.wait()
        self.run, self.is_newer = None, False


class RunBuffers:
    """The buffers of one rank, for the runs `[0, runs)`. One thread walks; between walks any thread may settle or forget.

    Args:
        io: moves bytes.
        runs: how many there are.
        count: buffers; memory is taken when one is first needed.
        nbytes: of the largest run.
        reads: what is read of a run before its step.
        writes: what is written of it afterwards.
        is_read_ahead: read runs before it is their turn, as far as there are buffers.
        is_write_behind: go on while a run is written.
        is_pinned: lock the memory for the accelerator.
    """

    def __init__(
        self,
        io: IoEngine,
        runs: int,
        count: int,
        nbytes: int,
        *,
        reads: Moves,
        writes: Moves,
        is_read_ahead: bool,
        is_write_behind: bool,
        is_pinned: bool = False,
    ) -> None:
        self._io = io
        self._runs = runs
        self._count = count
        self._nbytes = nbytes
        self._reads = reads
        self._writes = writes
        self._is_read_ahead = is_read_ahead
        self._is_write_behind = is_write_behind
        self._is_pinned = is_pinned
        self._buffers: list[_Buffer] = []
        self._holders: dict[int, _Buffer] = {}
        self._empty: list[_Buffer] = []
        self._unread: deque[int] = deque()  # runs of this walk whose read has not begun, in order
        self._leaving: deque[_Buffer] = deque()  # being written to make room, the first to be free first
        self._descends = False
        self._lock = threading.Lock()  # two who look at once must not both write a run

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def walk(self) -> Iterator[tuple[int, Tensor]]:
        """Give each of the runs in memory, in an order of this object's choice; what changes there is kept.

        Raises:
            FileIoError: [Note: torn].
        """
        order = range(self._runs - 1, -1, -1) if self._descends else range(self._runs)
        self._unread = deque(run for run in order if run not in self._holders)
        self._leaving.clear()
        is_complete = False
        try:
            for run in order:
                buffer = self._at_hand(run)
                while self._is_read_ahead and self._unread and (free := self._free(may_block=False)) is not None:
                    self._read_next(free)
                yield run, buffer.memory
                buffer.is_newer = True
                if len(self._unread) > len(self._leaving) + self._unused:
                    self._start_writing(run, buffer)
                    if not self._is_write_behind:
                        buffer.wait()
                    self._leaving.append(buffer)
            is_complete = True
            self._descends = not self._descends
        finally:
            if not is_complete:
                self.forget()

    def settle(self, of: Choice = _every) -> None:
        """Block until runs are in the files as they are in memory.

        Args:
            of: which.

        Raises:
            FileIoError: some of them are not. They stay in memory.
        """
        with self._lock:
            newer = [(b.run, b) for b in self._buffers if b.is_newer and b.run is not None and of(b.run)]
            for run, buffer in newer:
                if not buffer.is_under_way:
                    self._start_writing(run, buffer)
            errors = [error for _, buffer in newer if (error := _error_of(buffer)) is not None]
            if errors:
                raise errors[0]

    def forget(self, of: Choice = _every) -> None:
        """Read runs anew in the next walk, as they are in the files; what was not written is lost.

        Args:
            of: which.
        """
        with self._lock:
            for buffer in self._buffers:
                if buffer.run is None or of(buffer.run):
                    buffer.empty()
            self._holders = {buffer.run: buffer for buffer in self._buffers if buffer.run is not None}
            self._empty = [buffer for buffer in self._buffers if buffer.run is None]

    @property
    def _unused(self) -> int:
        return self._count - len(self._buffers) + len(self._empty)

    def _at_hand(self, run: int) -> _Buffer:
        if run not in self._holders:
            # Reads begin in the order of the walk, so this is the first of `_unread`. A walk begins with all buffers full
            # only if they hold the runs of its begin; so from one that was stepped, or was never full, there is a way here.
            free = self._free(may_block=True)
            assert free is not None
            self._read_next(free)
        buffer = self._holders[run]
        buffer.wait()
        return buffer

    def _free(self, *, may_block: bool) -> _Buffer | None:
        """A buffer that may be filled: an empty one, a new one, or the first that was written to make room."""
        if self._empty:
            return self._empty.pop()
        if len(self._buffers) < self._count:
            self._buffers.append(_Buffer(self._nbytes, is_pinned=self._is_pinned))
            return self._buffers[-1]
        if not self._leaving or not (may_block or self._leaving[0].is_still):
            return None
        buffer = self._leaving.popleft()
        buffer.wait()
        assert buffer.run is not None  # it was stepped
        del self._holders[buffer.run]
        return buffer

    def _read_next(self, free: _Buffer) -> None:
        run = free.run = self._unread.popleft()
        self._holders[run] = free
        free.start([self._io.read(m.file, m.file_start, _part(free, m)) for m in self._reads(run)])

    def _start_writing(self, run: int, buffer: _Buffer) -> None:
        buffer.start([self._io.write(m.file, m.file_start, _part(buffer, m)) for m in self._writes(run)])


def _part(buffer: _Buffer, move: Move) -> Tensor:
    return buffer.memory[move.buffer_start : move.buffer_start + move.nbytes]


def _error_of(moving: _Buffer | IoRequest) -> FileIoError | None:
    """Wait; the error instead of raising it."""
    try:
        moving.wait()
    except FileIoError as error:
        return error
    return None
