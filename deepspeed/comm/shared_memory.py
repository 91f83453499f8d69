"""The mean of gradients over ranks that share a host: every rank maps every rank's buffer.

    memory     row 0 | row 1 | row 2      one unnamed file (memfd) per rank, mapped by all: nothing to leave behind
               board                      one more: each rank writes its own line, all read
    launch n   board[rank]: range n is [start, stop) and holds my gradients
    wait       all launched n?  ->  mean of MY part of the range over all rows, into all rows  ->  board[rank]: n reduced
               all reduced n?   ->  my row holds the mean, and nobody touches my range any more

Lives here: the unnamed files, the agreement that all ranks can map them, the board, the reducer. Does not live here: how to
wait (`comm.patience`), the arithmetic (`comm.mean`), the collective that carries the agreement (`comm.algorithms` hands it
in). Only `comm.algorithms` calls this module.

[Note: progress] A launch stores a few words and returns; the arithmetic runs inside `wait` and is shared by all ranks. So
between a launch and its wait a rank must not block on something that another rank does only after its own wait. Programs
in which all ranks run the same calls keep this by themselves.

[Note: memory order] The words of the board are plain 8-byte loads and stores. x86-64 keeps the order of ordinary stores and
of ordinary loads, and an uncontended lock is a full fence for the rest (streaming stores of kernels). Other processors
promise less, so they use the back end.

[Note: names] `/proc/<pid>/fd/<n>` opens the unnamed file of a process of the same user. Device, inode and size are compared
before mapping, and all files are closed once all ranks have mapped them: the mappings keep the memory, and the kernel takes
it back with the last of them, however the ranks end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from deepspeed.comm.mean import BlockMean, MeanRule, check_range, own_part
from deepspeed.comm.patience import Patience, ProcessIdentity
from deepspeed.errors import CommError, UsageError

__all__ = ["Board", "SharedMemory", "SharedMemoryReducer", "share_memory"]

Gather = Callable[[list[int]], list[list[int]]]
"""All-gather of equally many 64-bit integers over the group; called by all its ranks."""

Record = Callable[[int, int], Callable[[], None] | None]
"""Called with bytes and ranks of each launch; what it returns is called when the mean is there. For the comms log."""

_CACHE_LINE_NBYTES = 64


class Board:
    """What the ranks of one reducer tell each other: a line of 64-bit words per rank, written by that rank alone.

        launched | reduced | state | range of launch n in slot n % SLOTS, as (start, stop)

    The first three lie on cache lines of their own. A slot is free again when all ranks have reduced its launch.
    """

    SLOTS = 256
    OPEN, LEFT, FAILED = 0, 1, 2
    _LAUNCHED, _REDUCED, _STATE, _RANGES = 0, 8, 16, 24
    _LINE = 1024
    """Words per rank: two pages, so that lines of different ranks share no page."""

    def __init__(self, words: memoryview, rank: int) -> None:
        """Store the words of all ranks (format "q" or "l") and whose line this process writes."""
        self._words = words
        self._line = rank * self._LINE
        self._fence = threading.Lock()
        self._owner_pid = os.getpid()

    @classmethod
    def nbytes(cls, world_size: int) -> int:
        """Memory of a board of that many ranks."""
        return world_size * cls._LINE * 8

    def launch(self, number: int, start: int, stop: int) -> None:
        """Say that this rank's range `number` (from 1) is ready to be reduced."""
        slot = self._slot(self._line, number)
        self._words[slot], self._words[slot + 1] = start, stop
        self._publish(self._LAUNCHED, number)

    def reduce(self, number: int) -> None:
        """Say that this rank has written its part of range `number` into all rows."""
        self._publish(self._REDUCED, number)

    def leave(self, state: int) -> None:
        """Say that this rank goes (LEFT or FAILED). Not said by a forked child, and the first reason stays."""
        if os.getpid() == self._owner_pid and self._words[self._line + self._STATE] == self.OPEN:
            self._publish(self._STATE, state)

    def launched(self, rank: int) -> int:
        """Ranges that `rank` has launched."""
        return self._words[rank * self._LINE + self._LAUNCHED]  # type: ignore[no-any-return, unused-ignore]

    def reduced(self, rank: int) -> int:
        """Ranges of which `rank` has reduced its part."""
        return self._words[rank * self._LINE + self._REDUCED]  # type: ignore[no-any-return, unused-ignore]

    def state(self, rank: int) -> int:
        """OPEN, LEFT or FAILED."""
        return self._words[rank * self._LINE + self._STATE]  # type: ignore[no-any-return, unused-ignore]

    def range(self, rank: int, number: int) -> tuple[int, int]:
        """The range that `rank` launched as `number`, one of its last `SLOTS`."""
        slot = self._slot(rank * self._LINE, number)
        return self._words[slot], self._words[slot + 1]

    def _slot(self, line: int, number: int) -> int:
        return line + self._RANGES + 2 * (number % self.SLOTS)

    def _publish(self, word: int, value: int) -> None:
        with self._fence:  # [Note: memory order]: all earlier stores are visible before this word is
            pass
        self._words[self._line + word] = value


class SharedMemory(NamedTuple):
    """What `share_memory` gives each rank."""

    rows: list[torch.Tensor]
    """One 1-D zeroed tensor per group rank, the same memory on every rank."""
    board: Board
    processes: list[ProcessIdentity]
    """Who writes which row."""


class _Invitation(NamedTuple):
    """What a rank tells the others, as integers: can it share, who and where it is, where its files are."""

    rank: int
    dtype: int
    numel: int
    is_able: int = 0
    host: int = 0
    pid: int = 0
    start_ticks: int = 0
    row_fd: int = 0
    row_device: int = 0
    row_inode: int = 0
    board_fd: int = 0
    board_device: int = 0
    board_inode: int = 0


class _Files:
    """This rank's unnamed files, open until all ranks have mapped them. Group rank 0 also makes the board."""

    def __init__(self, row_nbytes: int, board_nbytes: int) -> None:
        self.fds: list[int] = []
        try:
            for nbytes in (row_nbytes, board_nbytes):
                if nbytes:
                    self.fds.append(_unnamed_file())
                    os.ftruncate(self.fds[-1], nbytes)
        except OSError:
            self.close()
            raise

    def places(self) -> list[int]:
        """Descriptor, device and inode of each file, flat."""
        stats = [(fd, os.fstat(fd)) for fd in self.fds]
        return [value for fd, stat in stats for value in (fd, stat.st_dev, stat.st_ino)]

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def _unnamed_file() -> int:
    """Descriptor of a new empty memfd. By way of the C library: Pythons built for old systems lack os.memfd_create."""
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    if create is None:
        raise OSError("the C library has no memfd_create")
    fd = int(create(b"deepspeed", 1))  # 1: MFD_CLOEXEC
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"memfd_create: {os.strerror(number)}")
    return fd


def share_memory(
    numel: int, dtype: torch.dtype, rank: int, world_size: int, gather: Gather, may_share: bool = True
) -> SharedMemory | str:
    """Give every rank of a group a row of `numel` > 0 elements that all of them map, or say why that cannot be.

    Collective: all ranks call it, and all get memory or all get a reason. Blocks on two small gathers.

    Args:
        numel: elements of each row, the same on all ranks.
        dtype: of the rows, the same on all ranks.
        rank: of this process within the group.
        world_size: of the group.
        gather: all-gather of a list of integers over the group.
        may_share: False when this rank does not want to; then none does.

    Raises:
        CommError: on every rank, when ranks ask for different sizes or dtypes.
    """
    files, invitation, reason = _invite(numel, dtype, rank, world_size, may_share)
    try:
        invitations = [_Invitation(*values) for values in gather(list(invitation))]
        refusal = _refusal(invitations)
        if refusal:
            return f"{refusal}{reason}"
        memory: SharedMemory | None = None
        try:
            memory = _map(invitations, dtype, rank)
        except (OSError, RuntimeError) as error:  # torch reports a failed open or map as RuntimeError
            reason = f" (here: {error})"
        unable = [r for r, (is_mapped,) in enumerate(gather([int(memory is not None)])) if not is_mapped]
        if memory is None or unable:
            return f"group rank(s) {unable} cannot map the memory of the others{reason}"
        return memory
    finally:
        if files is not None:
            files.close()


def _invite(
    numel: int, dtype: torch.dtype, rank: int, world_size: int, may_share: bool
) -> tuple[_Files | None, _Invitation, str]:
    """Make this rank's files; without them the invitation says so and the text says why."""
    unable = _Invitation(rank, _small_hash(str(dtype)), numel)
    if not may_share:
        return None, unable, " (here: not wanted)"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None, unable, f" (here: {sys.platform} on {platform.machine()}, needed Linux on x86_64)"
    try:
        host, me = _small_hash(_host_name()), ProcessIdentity.of(os.getpid())
        if me is None:
            raise OSError("/proc does not show this process")
        files = _Files(numel * dtype.itemsize, 0 if rank else Board.nbytes(world_size))
    except OSError as error:
        return None, unable, f" (here: {error})"
    return files, _Invitation(*unable[:3], 1, host, *me, *files.places()), ""


def _refusal(invitations: Sequence[_Invitation]) -> str:
    """Why these ranks cannot share memory, the same text on every rank; empty when they can try."""
    if len({(each.numel, each.dtype) for each in invitations}) > 1:
        raise CommError(
            f"ranks of one group ask for gradient buffers that differ: {[each.numel for each in invitations]} elements by "
            "group rank, or different dtypes. All ranks need the same parameters in the same order and precision."
        )
    if [each.rank for each in invitations] != list(range(len(invitations))):
        return "the back end only pretends to gather"  # torch's fake process group
    unable = [each.rank for each in invitations if not each.is_able]
    if unable:
        return f"group rank(s) {unable} cannot create shared memory"
    if len({each.host for each in invitations}) > 1:
        return "the group spans hosts (or containers)"
    return ""


def _map(invitations: Sequence[_Invitation], dtype: torch.dtype, rank: int) -> SharedMemory:
    processes = [ProcessIdentity(each.pid, each.start_ticks) for each in invitations]
    for process in processes:
        if not process.is_alive():
            raise OSError(f"process {process.pid} is not visible from process {os.getpid()}")
    rows = []
    for each in invitations:
        storage = _map_file(each.pid, each.row_fd, (each.row_device, each.row_inode, each.numel * dtype.itemsize))
        rows.append(torch.empty(0, dtype=dtype).set_(storage))
    first = invitations[0]
    nbytes = Board.nbytes(len(invitations))
    storage = _map_file(first.pid, first.board_fd, (first.board_device, first.board_inode, nbytes))
    words = torch.empty(0, dtype=torch.int64).set_(storage).numpy().data
    return SharedMemory(rows, Board(words, rank), processes)


def _map_file(pid: int, fd: int, expected: tuple[int, int, int]) -> torch.UntypedStorage:
    """Map the whole file `fd` of process `pid`; `expected`: its device, inode and bytes. [Note: names]"""
    path = f"/proc/{pid}/fd/{fd}"
    stat = os.stat(path)
    found = (stat.st_dev, stat.st_ino, stat.st_size)
    if found != expected:
        raise OSError(f"{path} is another file: device, inode, bytes {found}, expected {expected}")
    storage = torch.UntypedStorage.from_file(path, True, expected[2])  # keeps no descriptor open
    assert isinstance(storage, torch.UntypedStorage)  # its annotation names the base class
    return storage


def _host_name() -> str:
    """What tells hosts and containers apart: name, boot and process-id namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _small_hash(text: str) -> int:
    """A hash that is equal in all processes and fits a signed 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


class SharedMemoryReducer:
    """`FlatAllReducer` over memory that all ranks of the group map. See the module's picture.

    Numbers: `comm.mean.BlockMean`; all ranks hold the same bits. After an error the contents of ranges in flight are
    undefined and every later call raises the same error. Forked children may read `buffer` but call nothing.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        ranks: Sequence[int],
        rule: MeanRule,
        communication_dtype: torch.dtype,
        patience: Patience,
        record: Record = lambda _nbytes, _world_size: None,
    ) -> None:
        """Store the parts.

        Args:
            memory: what `share_memory` gave.
            rank: of this process within the group.
            ranks: the global rank of each group rank.
            rule: when to divide.
            communication_dtype: contributions are rounded to it.
            patience: how to wait, and how long.
            record: told of each launch.
        """
        self.buffer = memory.rows[rank]
        self._rows = memory.rows
        self._board = memory.board
        self._processes = memory.processes
        self._rank = rank
        self._ranks = ranks
        self._mean = BlockMean(self.buffer.dtype, communication_dtype, rule)
        self._patience = patience
        self._record = record
        self._launched = self._reduced = self._completed = 0
        self._in_flight: deque[tuple[int, int]] = deque()  # ranges completed + 1 ... launched
        self._failure = ""
        self._is_closed = False
        self._leave = weakref.finalize(self, memory.board.leave, Board.LEFT)  # also runs when the interpreter ends

    def launch(self, start: int, stop: int) -> _RangeWork:
        """Start the in-place mean of `buffer[start:stop]`; do not touch the range until `wait` has returned.

        Every rank of the group launches the same ranges in the same order. Returns at once, unless `Board.SLOTS`
        launches are in flight: then the oldest is waited for.

        Raises:
            ArgumentError: the range is not inside the buffer.
            UsageError: the reducer is closed, or the range overlaps one in flight.
            CommError: as for `wait`.
        """
        self._check_usable()
        check_range(start, stop, self.buffer.numel())
        for low, high in self._in_flight:
            if start < high and low < stop:
                raise UsageError(
                    f"launch of [{start}, {stop}) while [{low}, {high}) is in flight; wait for that one before its elements "
                    "are reduced again."
                )
        self._complete(self._launched + 1 - Board.SLOTS)
        self._launched += 1
        self._in_flight.append((start, stop))
        self._board.launch(self._launched, start, stop)
        return _RangeWork(self, self._launched, self._record((stop - start) * self.buffer.itemsize, len(self._ranks)))

    def close(self) -> None:
        """Leave the group and let go of the others' rows; not collective, and a second call does nothing.

        Ranks that still wait for this one get an error. `buffer` and its views live on as this process's own.
        """
        self._leave()
        self._rows = []
        self._is_closed = True

    def _check_usable(self) -> None:
        if self._is_closed:
            raise UsageError("this gradient reducer is closed; build a new one to reduce again.")
        if self._failure:
            raise CommError(f"this gradient reducer cannot go on after its first error: {self._failure}")

    def _complete(self, number: int) -> None:
        """Block until range `number` and all before it hold the mean on this rank."""
        if number <= self._completed:
            return
        self._check_usable()
        try:
            # Ranges that all ranks have launched are reduced now too: the others then have less to wait for.
            while self._reduced < number or (self._reduced < self._launched and self._all_launched(self._reduced + 1)):
                self._reduce_next()
            self._await(self._board.reduced, number, "to reduce its part")
        except BaseException as error:  # an interrupt too may leave a range half reduced: nothing can follow
            self._failure = str(error) or repr(error)
            self._board.leave(Board.FAILED)
            raise
        for _ in range(number - self._completed):
            self._in_flight.popleft()
        self._completed = number

    def _reduce_next(self) -> None:
        number = self._reduced + 1
        self._await(self._board.launched, number, "to launch it")
        start, stop = self._range(number)
        for rank in range(len(self._ranks)):
            if self._board.range(rank, number) != (start, stop):
                self._refuse(number, rank)
        alignment = max(1, _CACHE_LINE_NBYTES // self.buffer.itemsize)
        self._mean.write(self._rows, *own_part(start, stop, self._rank, len(self._ranks), alignment))
        self._board.reduce(number)
        self._reduced = number

    def _range(self, number: int) -> tuple[int, int]:
        return self._in_flight[number - self._completed - 1]

    def _all_launched(self, number: int) -> bool:
        return all(self._board.launched(rank) >= number for rank in range(len(self._ranks)))

    def _await(self, count: Callable[[int], int], number: int, what: str) -> None:
        """Block until `count(rank) >= number` on all ranks; raise when one is gone or the time is over."""
        missing = list(range(len(self._ranks)))

        def is_ready() -> bool:
            while missing and count(missing[-1]) >= number:
                missing.pop()
            return not missing

        def look() -> None:
            gone = {rank: reason for rank in missing if (reason := self._reason_gone(rank))}
            if any(count(rank) < number for rank in gone):  # asked again: a rank may go after it has done its share
                causes = "; ".join(f"rank {self._ranks[rank]} {reason}" for rank, reason in gone.items())
                self._fail(number, f"cannot complete: {causes}. The log of the rank that went first holds the cause")

        if not self._patience.until(is_ready, look):
            late = [self._ranks[rank] for rank in missing if count(rank) < number]
            self._fail(
                number,
                f"did not complete within {self._patience.timeout_seconds:g} s: waiting for rank(s) {late} {what}. They "
                "hang or do other work: see their output. If they are only slow, raise DEEPSPEED_TIMEOUT (minutes)",
            )

    def _reason_gone(self, rank: int) -> str:
        if not self._processes[rank].is_alive():
            return f"(process {self._processes[rank].pid}) died"
        state = self._board.state(rank)
        return {Board.OPEN: "", Board.LEFT: "closed its reducer or ended", Board.FAILED: "failed"}[state]

    def _refuse(self, number: int, rank: int) -> NoReturn:
        self._fail(
            number,
            f"cannot be taken: rank {self._ranks[rank]} launched {list(self._board.range(rank, number))} as its launch "
            f"number {number}. All ranks must launch the same ranges in the same order",
        )

    def _fail(self, number: int, text: str) -> NoReturn:
        start, stop = self._range(number)
        raise CommError(
            f"rank {self._ranks[self._rank]}: the mean of gradient elements [{start}, {stop}) of {self.buffer.numel()} over "
            f"ranks {list(self._ranks)} {text}."
        )


class _RangeWork:
    """One range in flight."""

    def __init__(self, reducer: SharedMemoryReducer, number: int, on_mean: Callable[[], None] | None) -> None:
        self._reducer = reducer
        self._number = number
        self._on_mean = on_mean

    def wait(self) -> None:
        """Block until the range holds the mean on this rank and no other rank touches it any more.

        Raises:
            CommError: a rank died, left, is late, or launched another range; the text names it.
            UsageError: the reducer was closed meanwhile.
        """
        self._reducer._complete(self._number)
        if self._on_mean is not None:
            self._on_mean()
            self._on_mean = None
