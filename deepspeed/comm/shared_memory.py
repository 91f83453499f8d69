"""Memory that all ranks of one host map: unnamed files, one row per rank, and a board to meet at.

    row 0 | row 1 | row 2      one unnamed file (memfd) per rank, mapped by all: nothing to leave behind
    board                      one more: each rank writes its own line, all read (`comm.board`)

Lives here: the unnamed files and the agreement that all ranks can map them. Does not live here: what is done with them
(`comm.shared_reducer`, `comm.shared_shards`), the collective that carries the agreement (`comm.algorithms` hands it in and
is the only caller).

[Note: names] `/proc/<pid>/fd/<n>` opens the unnamed file of a process of the same user. Device, inode and size are compared
before mapping, and all files are closed once all ranks have mapped them: the mappings keep the memory, and the kernel takes
it back with the last of them, however the ranks end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from deepspeed.comm.board import Board
from deepspeed.comm.patience import ProcessIdentity, host_identity
from deepspeed.errors import CommError

__all__ = ["SharedMemory", "share_memory"]

Gather = Callable[[list[int]], list[list[int]]]
"""All-gather of equally many 64-bit integers over the group; called by all its ranks."""


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
        host, me = host_identity(), ProcessIdentity.of(os.getpid())
        if me is None:
            raise OSError("/proc does not show this process")
        files = _Files(numel * dtype.itemsize, 0 if rank else Board.nbytes(world_size))
    except OSError as error:
        return None, unable, f" (here: {error})"
    return files, _Invitation(*unable[:3], 1, _small_hash(host), *me, *files.places()), ""


def _refusal(invitations: Sequence[_Invitation]) -> str:
    """Why these ranks cannot share memory, the same text on every rank; empty when they can try."""
    if len({(each.numel, each.dtype) for each in invitations}) > 1:
        raise CommError(
            f"ranks of one group ask for shared buffers that differ: {[each.numel for each in invitations]} elements by "
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


def _small_hash(text: str) -> int:
    """A hash that is equal in all processes and fits a signed 64-bit integer."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
