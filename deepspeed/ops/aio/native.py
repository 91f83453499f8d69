"""The back ends of the native library (csrc/io): io_uring, libaio's system calls, or threads in C++.

Requests are cut up, submitted and collected by threads that never take the interpreter's lock. Called by `choice`.
"""

from __future__ import annotations

import ctypes
import os

from deepspeed.ops.aio.backend import Outcome, Ticket, Transfer
from deepspeed.ops.aio.settings import IoSettings
from deepspeed.ops.native import NativeLibrary

__all__ = ["NATIVE_KINDS", "NativeBackend"]

NATIVE_KINDS = ("io_uring", "libaio", "threads")
"""Best first."""

_I32, _I64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Functions:
    """The functions of csrc/native.h about files, with their types."""

    def __init__(self, library: NativeLibrary) -> None:
        out = ctypes.POINTER(_POINTER)
        self.open = library.function("ds_io_open", _I32, ctypes.c_char_p, _I64, _I32, _I32, _I32, _I32, out)
        self.close = library.function("ds_io_close", None, _POINTER)
        self.start = library.function("ds_io_start", _I32, _POINTER, _I32, _I32, _I32, _I64, _I64, _POINTER, _I64, _I64, out)
        self.wait = library.function("ds_io_wait", _I32, _POINTER, _I64)
        self.outcome = library.function("ds_io_outcome", _I32, _POINTER, ctypes.POINTER(_I64))
        self.release = library.function("ds_io_release", None, _POINTER)


class _NativeTicket:
    """A request of the native library; frees it at the end. The engine drops no ticket before that is done."""

    def __init__(self, functions: _Functions, request: ctypes.c_void_p) -> None:
        self._functions = functions
        self._request = request
        self._owner = os.getpid()

    def wait(self, seconds: float) -> bool:
        return bool(self._functions.wait(self._request, int(seconds * 1e6)))

    def outcome(self) -> Outcome:
        moved_nbytes = _I64()
        number = self._functions.outcome(self._request, ctypes.byref(moved_nbytes))
        return Outcome(number, moved_nbytes.value)

    def __del__(self) -> None:
        if self._owner == os.getpid():  # a forked process has a copy that nobody will ever finish
            self._functions.release(self._request)


class NativeBackend:
    """One engine of the native library."""

    def __init__(self, library: NativeLibrary, kind: str, settings: IoSettings) -> None:
        """Start it.

        Raises:
            OSError: this system does not have the kind (ENOSYS; EPERM where a container forbids it), or no room for it
                (EAGAIN, ENOMEM).
        """
        self.kind = kind
        self._functions = _Functions(library)
        self._engine = _POINTER()
        error = self._functions.open(
            kind.encode(),
            settings.whole_block_nbytes,
            settings.queue_depth,
            settings.threads,
            settings.single_submit,
            settings.overlap_events,
            ctypes.byref(self._engine),
        )
        _check(error)

    def submit(self, transfer: Transfer) -> Ticket:
        """Put it in the queue."""
        request = _POINTER()
        _check(self._functions.start(self._engine, *transfer, ctypes.byref(request)))
        return _NativeTicket(self._functions, request)

    def close(self) -> None:
        """End the threads when the queue is empty."""
        self._functions.close(self._engine)


def _check(error: int) -> None:
    if error < 0:
        raise OSError(-error, os.strerror(-error))
