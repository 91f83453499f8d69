"""Shards that go to a file one by one while a model is built: `zero.Init` with `remote_device="nvme"`.

    keep    | shard 0 | shard 1 | shard 2 |         one after another, each at a multiple of 64 bytes; writes are joined
    load    the pages around a shard are read directly
    (last reference to a run goes)                  the file is removed with the last of them

How large the model will be is not known, so space is taken piece by piece; that of runs that are gone is not used again.

Called by `zero.shard`. Does not live here: the parameters of an engine, whose file is planned (`offload.parameters`).
"""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.errors import FileIoError
from deepspeed.offload.sub_groups import PAGE_NBYTES, aligned
from deepspeed.offload.swap_folder import SwapFolder
from deepspeed.offload.write_behind import WriteBehind
from deepspeed.ops.aio.engine import IoEngine, IoSettings, aligned_empty

__all__ = ["Run", "ShardFile"]

_RESERVE_NBYTES = 64 << 20
_BORDER_NBYTES = 64


class Run:
    """One shard in the file. It is there as long as this object."""

    def __init__(self, file: ShardFile, start: int, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype
        self._file = file
        self._start = start

    def load(self) -> Tensor:
        """The values, 1-D, in new host memory. Raises FileIoError."""
        return self._file.read(self._start, self.numel, self.dtype)

    def save(self, values: Tensor) -> None:
        """Let the first elements be `values`; copied before the call returns. Raises FileIoError."""
        self._file.writes.write(self._start, values, self.dtype)


class ShardFile:
    """A file that grows, in a folder of this process's own. Removed when it and all its runs are forgotten, or at exit.

    Args:
        parent: a folder on the disk that is to be used.
        label: shown in the folder's name.
        settings: of the reads and writes.

    Raises:
        FileIoError: no folder or file can be made in `parent`.
    """

    def __init__(self, parent: Path, label: str, settings: IoSettings) -> None:
        folder = SwapFolder.claim(parent, label)
        self._io = IoEngine(settings)
        self._file = self._io.open(folder.path / "shards", create=True)
        self.writes = WriteBehind(self._io, self._file)
        self._end = self._reserved = 0
        self.close = weakref.finalize(self, _close, self.writes, self._io, folder)

    def keep(self, values: Tensor) -> Run:
        """Take the values of a 1-D tensor; copied before the call returns.

        Raises:
            FileIoError: there is no space for them, or an earlier write failed.
        """
        start, size = self._end, values.element_size()
        numel = values.numel() + -(values.numel() * size) % _BORDER_NBYTES // size
        self._reserve(start + numel * size)
        self.writes.write(start, values, values.dtype)
        self.writes.write(start + values.nbytes, values.new_zeros(numel - values.numel()), values.dtype)
        self._end = start + numel * size
        return Run(self, start, values.numel(), values.dtype)

    def read(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Elements from byte `start` on, in new host memory."""
        self.writes.settle()
        shift, nbytes = start % PAGE_NBYTES, numel * dtype.itemsize
        memory = aligned_empty(aligned(shift + nbytes))
        self._io.read(self._file, start - shift, memory).wait()
        return memory[shift : shift + nbytes].view(dtype)

    def _reserve(self, end: int) -> None:
        """Take space up to `end`, and some more where there is some."""
        if aligned(end) <= self._reserved:
            return
        fd = self._file.buffered_fd
        for nbytes in (aligned(end) + _RESERVE_NBYTES, aligned(end)):
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                failure = error
            else:
                self._reserved = nbytes
                return
        disk = os.fstatvfs(fd)
        raise FileIoError(
            failure.errno or errno.ENOSPC,
            f"{self._file.path} needs {aligned(end)} bytes by now, and {disk.f_bavail * disk.f_frsize} more are free on its "
            f"disk: {os.strerror(failure.errno or errno.ENOSPC)}. Free space, or name a larger disk in "
            "offload_param.nvme_path.",
        )


def _close(writes: WriteBehind, io: IoEngine, folder: SwapFolder) -> None:
    writes.close()
    io.close()
    folder.close()
