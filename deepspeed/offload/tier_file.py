"""One file of a tier, as what looks at it between two walks sees it: ranges of bytes, read and written at once.

    write [a, b) [b, c) [c, d)   ---> | window: [a, d) | ---> one aligned write         neighbours are joined
    read                         ---> whatever is under way first, then the bytes

The walk itself moves whole runs through the same file (`run_buffers`). The two must not meet: `before_access` is called
with the bytes of each look here, so that what the walk has left of them is in the file, and `after_write` when its buffers
are out of date there.

Called by `zero.masters` and `zero.disk_residence`. Does not live here: the folder (`swap_folder`).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.errors import FileIoError
from deepspeed.offload.sub_groups import PAGE_NBYTES, aligned
from deepspeed.ops.aio.engine import IoEngine, aligned_empty

__all__ = ["TierFile", "bytes_of", "read_new"]

_WINDOW_NBYTES = 4 << 20
_LARGEST_GAP_NBYTES = 63  # padding up to a border of 64 bytes; read, because a caller may write less than is there


class TierFile:
    """A file of `nbytes` zeros, reserved on the disk. Any thread may read and write: a snapshot is taken beside the caller.

    Args:
        io: moves bytes.
        path: in a folder of this process's own.
        nbytes: its size.

    Attributes:
        file: for the walk.
        nbytes: as given.

    Raises:
        FileIoError: there is no space for it; the text has the numbers.
    """

    def __init__(self, io: IoEngine, path: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.before_access: Callable[[int, int], None] = lambda start, stop: None
        self.after_write: Callable[[int, int], None] = lambda start, stop: None
        self._io = io
        self.file = io.open(path, aligned(max(nbytes, 1)), create=True)
        self._window: Tensor | None = None  # memory of the bytes [_begin, _end) that wait to be written
        self._begin = self._end = 0
        self._lock = threading.RLock()

    def read(self, start: int, into: Tensor) -> None:
        """Fill `into` with the bytes from `start` on. Blocks.

        Raises:
            FileIoError: it could not be read; the text names file and place.
        """
        with self._lock:
            self.before_access(start, start + into.nbytes)
            self.flush()
        self._io.read(self.file, start, into).wait()

    def write(self, start: int, of: Tensor) -> None:
        """Let the bytes from `start` on be those of `of`, a contiguous host tensor; copied before the call returns.

        Raises:
            FileIoError: it, or what was written before it, could not be written.
        """
        data = bytes_of(of)
        touched = max(0, start - _LARGEST_GAP_NBYTES), start + data.numel()  # a gap before it is read, and written again
        with self._lock:
            self.before_access(*touched)
            while data.numel():
                room = self._room_at(start)
                part, data = data[:room], data[room:]
                self._memory(start, part.numel()).copy_(part)
                self._end = start = start + part.numel()
            self.after_write(*touched)

    def flush(self) -> None:
        """Bring into the file what waits to be written; the memory for it is given back.

        Raises:
            FileIoError: it could not be written.
        """
        with self._lock:
            self._write_window()
            self._window = None

    def restore(self) -> None:
        """Give the file its length again where somebody has cut it: all of it is about to be written anew.

        Raises:
            FileIoError: the system refuses.
        """
        whole_nbytes = aligned(max(self.nbytes, 1))
        try:
            if os.stat(self.file.path).st_size < whole_nbytes:
                os.truncate(self.file.path, whole_nbytes)
        except OSError as error:
            raise FileIoError(
                error.errno or errno.EIO, f"cannot give {self.file.path} its {whole_nbytes} bytes again: {error.strerror}."
            ) from error

    def close(self) -> None:
        """Let go of the file; what waits to be written is dropped."""
        self._window = None
        self._begin = self._end = 0
        self.file.close()

    def _room_at(self, start: int) -> int:
        """Bytes that may be put at `start` into the window; where nothing may, it is written and begins anew there."""
        gap = start - self._end
        if not (self._begin < self._end and 0 <= gap <= _LARGEST_GAP_NBYTES and self._filled_until(start) < _WINDOW_NBYTES):
            self._write_window()
            self._begin = self._end = start
        if start > self._end:
            self._io.read(self.file, self._end, self._memory(self._end, start - self._end)).wait()
            self._end = start
        return _WINDOW_NBYTES - self._filled_until(start)

    def _filled_until(self, start: int) -> int:
        return self._begin % PAGE_NBYTES + start - self._begin

    def _memory(self, start: int, nbytes: int) -> Tensor:
        """Where the bytes from `start` on are in the window; as far from a page's begin as in the file."""
        if self._window is None:
            self._window = aligned_empty(_WINDOW_NBYTES)
        first = self._filled_until(start)
        return self._window[first : first + nbytes]

    def _write_window(self) -> None:
        begin, end = self._begin, self._end
        if begin < end:
            waiting = self._memory(begin, end - begin)
            self._begin = self._end = 0
            self._io.write(self.file, begin, waiting).wait()


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor as 1-D bytes; a view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def read_new(file: TierFile, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A new 1-D tensor of the bytes from `start` on, laid out so that whole pages are read directly."""
    nbytes = numel * dtype.itemsize
    shift = start % PAGE_NBYTES
    memory = aligned_empty(shift + nbytes)[shift:]
    if numel:
        file.read(start, memory)
    return memory.view(dtype)
