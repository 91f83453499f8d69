"""Sub-groups on their way between a disk and memory while a walk steps them one after another.

    walk 1    0  1  2  3  4  5      reads and writes each of them; 4 and 5 stay in their buffers
    walk 2    5  4  3  2  1  0      the other way round, so those need no read; 1 and 0 stay

    buffer a  | step i   | write i       | read i+3 ...
    buffer b  | read i+1 | step i+1      | write i+1 ...
    buffer c  | write i-1 | read i+2     | step i+2 ...

A run is the bytes of one sub-group; where its parts lie in files and in a buffer is told by the caller, anew each time,
because state may come to exist. A buffer is filled again when what was in it is on the disk. What was written last may still
be on its way when a walk is over (`is_write_behind`); `settle` waits for it.

[Note: torn] When a read or write fails, or a step raises, some runs are stepped and others are not. Buffers are then
emptied; that the files are of no use any more is the caller's to remember.

Does not live here: what runs hold (`zero.disk_residence`, the caller), how many and how large (`sub_groups`).
"""

from __future__ import annotations

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


Moves = Callable[[int], Sequence[Move]]
"""Number of a run -> what is moved of it."""


class _Buffer:
    """Memory for one run at a time. `run` is what it holds, or is being filled with."""

    def __init__(self, nbytes: int, *, is_pinned: bool) -> None:
        self.memory = aligned_empty(nbytes, is_pinned=is_pinned)
        self.run: int | None = None
        self._requests: list[IoRequest] = []

    @property
    def is_still(self) -> bool:
        """Whether nothing moves in or out."""
        return all(request.is_done for request in self._requests)

    def start(self, requests: list[IoRequest]) -> None:
        """Remember what moves."""
        self._requests = requests

    def wait(self) -> None:
        """Block until nothing moves; after an error the buffer is empty."""
        requests, self._requests = self._requests, []
        errors = [error for request in requests if (error := _error_of(request)) is not None]
        if errors:
            self.run = None
            raise errors[0]


class RunBuffers:
    """The buffers of one rank. Used by one thread.

    Args:
        io: moves bytes.
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
        self._count = count
        self._nbytes = nbytes
        self._reads = reads
        self._writes = writes
        self._is_read_ahead = is_read_ahead
        self._is_write_behind = is_write_behind
        self._is_pinned = is_pinned
        self._buffers: list[_Buffer] = []
        self._passed: list[_Buffer] = []  # of this walk, the first passed first
        self._descends = False

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def walk(self, runs: int) -> Iterator[tuple[int, Tensor]]:
        """Give each of the runs `[0, runs)` in memory, in an order of this object's choice; what changes there is kept.

        Raises:
            FileIoError: [Note: torn].
        """
        order = range(runs - 1, -1, -1) if self._descends else range(runs)
        self._passed = []
        is_complete = False
        try:
            for position, run in enumerate(order):
                buffer = self._at_hand(run)
                if self._is_read_ahead:
                    self._read_ahead(order[position + 1 :], buffer)
                yield run, buffer.memory
                buffer.start([self._io.write(m.file, m.file_start, _part(buffer, m)) for m in self._writes(run)])
                if not self._is_write_behind:
                    buffer.wait()
                self._passed.append(buffer)
            is_complete = True
            self._descends = not self._descends
        finally:
            if not is_complete:
                with suppress(FileIoError):  # the first error is on its way already
                    self.forget()

    def settle(self) -> None:
        """Block until everything written is in the files.

        Raises:
            FileIoError: some of it is not.
        """
        errors = [error for buffer in self._buffers if (error := _error_of(buffer)) is not None]
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """Read everything anew in the next walk: the files were changed from outside. Settles."""
        try:
            self.settle()
        finally:
            for buffer in self._buffers:
                buffer.run = None

    def _at_hand(self, run: int) -> _Buffer:
        buffer = self._holder(run)
        if buffer is None:
            buffer = self._free(may_block=True)
            assert buffer is not None  # it may block: no run but this one is in use
            self._start_reading(run, buffer)
        buffer.wait()
        return buffer

    def _holder(self, run: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.run == run), None)

    def _read_ahead(self, coming: Sequence[int], in_use: _Buffer) -> None:
        for run in coming:
            if self._holder(run) is None:
                buffer = self._free(may_block=False, in_use=in_use)
                if buffer is None:
                    return
                self._start_reading(run, buffer)

    def _free(self, *, may_block: bool, in_use: _Buffer | None = None) -> _Buffer | None:
        """A buffer that may be filled: an empty one, a new one, or that of the run that was passed first."""
        for buffer in self._buffers:
            if buffer.run is None and buffer is not in_use and buffer.is_still:
                return buffer
        if len(self._buffers) < self._count:
            self._buffers.append(_Buffer(self._nbytes, is_pinned=self._is_pinned))
            return self._buffers[-1]
        if not self._passed:
            return self._last_resort() if may_block else None
        if not (may_block or self._passed[0].is_still):
            return None
        buffer = self._passed.pop(0)
        buffer.wait()
        return buffer

    def _last_resort(self) -> _Buffer:
        """The walk needs a run now, and buffers hold later ones: after a walk of another number of runs."""
        buffer = self._buffers[-1]
        buffer.wait()
        return buffer

    def _start_reading(self, run: int, buffer: _Buffer) -> None:
        buffer.run = run
        buffer.start([self._io.read(m.file, m.file_start, _part(buffer, m)) for m in self._reads(run)])


def _part(buffer: _Buffer, move: Move) -> Tensor:
    return buffer.memory[move.buffer_start : move.buffer_start + move.nbytes]


def _error_of(moving: _Buffer | IoRequest) -> FileIoError | None:
    """Wait; the error instead of raising it."""
    try:
        moving.wait()
    except FileIoError as error:
        return error
    return None
