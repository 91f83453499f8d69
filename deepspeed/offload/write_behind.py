"""Writing a file in small pieces while other things go on: neighbours are joined, several windows are on their way.

    write [a, b) [b, c)      window 0: [a, c)     being filled
    write [c, d) ...         window 1: ..         on its way to the disk
                             window 2: ..         on its way

The caller's memory is copied, and rounded to the file's dtype on the way; it may change at once. Nothing is in the file
for certain before `settle`.

Called by `offload.parameters`. Does not live here: reads, and what the bytes mean.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from deepspeed.errors import FileIoError
from deepspeed.offload.sub_groups import PAGE_NBYTES
from deepspeed.ops.aio.engine import IoEngine, IoFile, IoRequest, aligned_empty

__all__ = ["WINDOWS", "WINDOW_NBYTES", "WriteBehind"]

WINDOW_NBYTES = 2 << 20
"""Bytes of one window."""

WINDOWS = 3
"""Windows of one file, at most."""


class _Window:
    """Memory for one write."""

    def __init__(self) -> None:
        self.memory = aligned_empty(WINDOW_NBYTES)
        self.request: IoRequest | None = None

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether bytes of `[begin, end)` may be on their way: two requests for one place have no order."""
        request = self.request
        return request is not None and request.offset < end and begin < request.offset + request.nbytes


class WriteBehind:
    """The writes of one rank to one file. Safe for several threads, which write different places.

    Args:
        io: moves bytes.
        file: opened by `io`.
    """

    def __init__(self, io: IoEngine, file: IoFile) -> None:
        self._io = io
        self._file = file
        self._windows: list[_Window] = []  # the one to be filled last
        self._begin = self._end = 0  # bytes of the file that wait in the last window; none where equal
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return sum(window.memory.nbytes for window in self._windows)

    def write(self, start: int, source: Tensor, dtype: torch.dtype) -> None:
        """Let the bytes from `start` on be those of `source` in `dtype`.

        Args:
            start: a multiple of the dtype's size.
            source: 1-D, of any dtype and device.
            dtype: of the file's values.

        Raises:
            FileIoError: an earlier write failed.
        """
        with self._lock:
            self._write(start, source, dtype)

    def _write(self, start: int, source: Tensor, dtype: torch.dtype) -> None:
        done = 0
        while done < source.numel():
            if start != self._end or self._room() < dtype.itemsize or self._begin == self._end:
                self._begin_at(start)
            part = source[done : done + self._room() // dtype.itemsize]
            first = self._filled()
            target = self._windows[-1].memory[first : first + part.numel() * dtype.itemsize].view(dtype)
            target.copy_(part)
            done += part.numel()
            self._end = start = start + target.nbytes

    def settle(self) -> None:
        """Block until everything written is in the file; memory is given back.

        Raises:
            FileIoError: some of it is not.
        """
        with self._lock:
            self._send()
            windows, self._windows = self._windows, []
            errors = [error for window in windows if (error := _error_of(window)) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Forget what waits, wait for what is on its way, whatever becomes of it, and close the file."""
        self._begin = self._end = 0
        for window in self._windows:
            _error_of(window)
        self._windows = []
        self._file.close()

    def _filled(self) -> int:
        """Where the bytes from `_end` on are in the window: as far from a page's begin as in the file."""
        return self._begin % PAGE_NBYTES + self._end - self._begin

    def _room(self) -> int:
        return WINDOW_NBYTES - self._filled()

    def _begin_at(self, start: int) -> None:
        self._send()
        if len(self._windows) < WINDOWS:
            self._windows.append(_Window())
        else:
            oldest = self._windows.pop(0)
            self._windows.append(oldest)
            error = _error_of(oldest)
            if error is not None:
                raise error
        self._begin = self._end = start

    def _send(self) -> None:
        if self._begin < self._end:
            window, begin, end = self._windows[-1], self._begin, self._end
            first = begin % PAGE_NBYTES
            self._begin = self._end = 0
            for earlier in self._windows[:-1]:
                if earlier.overlaps(begin, end) and (error := _error_of(earlier)) is not None:
                    raise error
            window.request = self._io.write(self._file, begin, window.memory[first : first + end - begin])


def _error_of(window: _Window) -> FileIoError | None:
    """Wait; the error instead of raising it."""
    request, window.request = window.request, None
    try:
        if request is not None:
            request.wait()
    except FileIoError as error:
        return error
    return None
