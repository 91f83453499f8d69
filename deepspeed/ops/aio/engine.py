"""Reading and writing files beside the computation: one engine, several ways of doing it.

    tensor --- read / write ---> IoRequest --- blocks, several in flight ---> back end ---> disk
                                     |
                                 wait(): the bytes are there, or an error that says which are not

Lives here: `IoEngine` and its requests. Does not live here: files (`files`), the cut between direct and buffered
(`ranges`), the back ends (`native`, `threads`). Called by the tiers of `offload`, by `io`, by `aio_handle` and by the
commands of `nvme`.

[Note: bytes in flight] The system reads into and writes from the tensor's own memory. So the engine holds each tensor
until its request is done, also when the caller has dropped both; and an engine waits for all requests before it ends, at
the latest when the interpreter does.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path
from types import TracebackType

from torch import Tensor
from typing_extensions import Self

from deepspeed.errors import ArgumentError, FileIoError, UsageError
from deepspeed.ops.aio.backend import Backend, Outcome, Ticket, Transfer
from deepspeed.ops.aio.choice import make_backend
from deepspeed.ops.aio.files import Creation, IoFile, cure_of, open_file
from deepspeed.ops.aio.memory import aligned_empty
from deepspeed.ops.aio.ranges import direct_part
from deepspeed.ops.aio.settings import IoSettings

__all__ = ["IoEngine", "IoFile", "IoRequest", "IoSettings", "aligned_empty"]

_LOOK_SECONDS = 0.2  # how long a wait stays in native code, where Ctrl-C is not seen
_TIDY_COUNT = 32  # finished requests whose tensors are held for want of a call that looks


class IoRequest:
    """One read or write in flight. Holds its tensor until it is done ([Note: bytes in flight]).

    Attributes:
        file: what is read or written.
        offset: where in the file, bytes.
        nbytes: how much.
        is_write: the direction.
    """

    def __init__(self, file: IoFile, offset: int, nbytes: int, is_write: bool) -> None:
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.is_write = is_write
        self._tensor: Tensor | None = None
        self._ticket: Ticket | None = None
        self._outcome: Outcome | None = Outcome(0, 0)  # of an empty request; else unknown from `_begin` on

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_over(0.0)

    def wait(self) -> None:
        """Block until all bytes have moved. Again: the same answer.

        Raises:
            FileIoError: they have not: a failing or full disk, a file that ends before. `into` holds part of the bytes
                then.
        """
        while not self._is_over(_LOOK_SECONDS):
            pass
        assert self._outcome is not None  # `_is_over` has seen to it
        number, moved_nbytes = self._outcome
        if number != 0:
            raise FileIoError(number, self._explain(number, moved_nbytes))

    def _begin(self, backend: Backend, transfer: Transfer, tensor: Tensor) -> None:
        self._outcome, self._tensor = None, tensor
        self._ticket = backend.submit(transfer)

    def _is_over(self, seconds: float) -> bool:
        ticket = self._ticket
        if self._outcome is None and ticket is not None and ticket.wait(seconds):
            self._outcome = ticket.outcome()  # two threads may both come here: they find the same
            self._ticket = self._tensor = None
        return self._outcome is not None

    def _explain(self, number: int, moved_nbytes: int) -> str:
        did = "write" if self.is_write else "read"
        cause = os.strerror(number)
        if number == errno.ENODATA:
            ends = self.offset + moved_nbytes if self.file.is_closed else self.file.nbytes
            cause = f"the file ends at byte {ends}"
        return (
            f"cannot {did} {self.file.path}: {self.nbytes} bytes at offset {self.offset} were asked for, "
            f"{moved_nbytes} could be {'written' if self.is_write else 'read'}: {cause}. {cure_of(number)}"
        )


class IoEngine:
    """Reads and writes files asynchronously. Any thread may call it. Leaving the context closes it.

    Attributes:
        settings: as given.
        kind: what carries out requests: "io_uring", "libaio" or "threads".
    """

    def __init__(self, settings: IoSettings | None = None, backend: Backend | None = None) -> None:
        """Start it.

        Args:
            settings: how; the defaults of the `aio` block.
            backend: what carries out requests, in place of the one that `settings` ask for; for tests.

        Raises:
            UsageError: this system does not have the kind that is asked for.
        """
        self.settings = settings or IoSettings()
        self._backend = backend or make_backend(self.settings)
        self.kind = self._backend.kind
        self._owner = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may close a file inside of any call
        self._flying: set[IoRequest] = set()
        self._tidy_at = _TIDY_COUNT
        self._end = weakref.finalize(self, _end_backend, self._backend, self._owner)

    def open(self, path: str | Path, nbytes: int | None = None, *, create: bool = False, keep: bool = False) -> IoFile:
        """Open a file for this engine.

        Args:
            path: of the file; its folder exists.
            nbytes: with `create`, the length that is reserved on the disk at once; without, the least that it must have.
            create: a new, empty file. Without: a file that exists, for reading only where the system allows no more.
            keep: with `create`, a file that exists is not emptied.

        Raises:
            FileIoError: it cannot be opened, is shorter, or there is no space: the text has both numbers, and a file that
                was made or emptied is not left behind.
        """
        self._check_use()
        return open_file(Path(path), nbytes, Creation.of(create, keep), self._drain)

    def read(self, file: IoFile, offset: int, into: Tensor) -> IoRequest:
        """Begin to fill `into` with the bytes of the file from `offset` on.

        Args:
            file: opened by this engine.
            offset: bytes; any, but multiples of 4096 with memory of `aligned_empty` go directly, without a copy.
            into: contiguous host tensor of any dtype. Its contents are undefined until the request is done.
        """
        return self._start(file, offset, into, is_write=False)

    def write(self, file: IoFile, offset: int, of: Tensor) -> IoRequest:
        """Begin to write the bytes of `of` to the file, from `offset` on; the file grows as needed.

        Args:
            file: opened by this engine.
            offset: bytes; as in `read`.
            of: contiguous host tensor of any dtype. It must not change until the request is done.
        """
        return self._start(file, offset, of, is_write=True)

    def close(self) -> None:
        """Wait for all requests, then end the threads. Again: nothing. Files stay open."""
        if self._end.alive and self._owner == os.getpid():
            self._drain()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, file: IoFile, offset: int, tensor: Tensor, is_write: bool) -> IoRequest:
        nbytes = _check_memory(tensor, offset)
        request = IoRequest(file, offset, nbytes, is_write)
        self._check_use()  # before the lock: in a forked process a thread that is not there may hold it
        with self._lock:
            self._check_use()
            self._check_file(request)
            if nbytes == 0:
                return request
            request._begin(self._backend, _transfer(request, tensor.data_ptr()), tensor)
            self._flying.add(request)
            if len(self._flying) >= self._tidy_at:
                self._flying = {one for one in self._flying if not one.is_done}
                self._tidy_at = 2 * len(self._flying) + _TIDY_COUNT
        return request

    def _drain(self, file: IoFile | None = None) -> None:
        """Wait for the requests of a file, or all."""
        if self._owner != os.getpid():
            return  # they are the parent's
        with self._lock:
            flying = [one for one in self._flying if file is None or one.file is file]
        for request in flying:
            while not request._is_over(_LOOK_SECONDS):
                pass
        with self._lock:
            self._flying.difference_update(flying)

    def _check_use(self) -> None:
        if self._owner != os.getpid():
            raise UsageError(
                f"this IoEngine belongs to process {self._owner}, and was used in process {os.getpid()}, which was forked "
                "from it and has none of its threads. Make an engine after the fork."
            )
        if not self._end.alive:
            raise UsageError("this IoEngine is closed. Use it before close(), or make another.")

    def _check_file(self, request: IoRequest) -> None:
        file = request.file
        if not isinstance(file, IoFile) or not file.is_of(self._drain):
            name = file.path if isinstance(file, IoFile) else repr(file)
            raise ArgumentError(
                f"{name} was not opened by this IoEngine, so closing it would not wait for requests in flight here. "
                "Open it with open() of this engine."
            )
        if file.is_closed or (request.is_write and not file.is_writable):
            state = "closed" if file.is_closed else "open for reading only"
            raise FileIoError(
                errno.EBADF,
                f"cannot {'write' if request.is_write else 'read'} {request.nbytes} bytes at offset {request.offset} of "
                f"{file.path}: it is {state}. {cure_of(errno.EBADF)}",
            )


def _end_backend(backend: Backend, owner: int) -> None:
    if owner == os.getpid():  # a forked process has the objects, but neither the threads nor the requests
        backend.close()


def _check_memory(tensor: Tensor, offset: int) -> int:
    """The bytes of a tensor that a file can be read into or written from."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"{type(tensor).__name__} was given, but files are read into and written from tensors. Give one."
        )
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ArgumentError(
            f"a tensor on {tensor.device}, {'contiguous' if tensor.is_contiguous() else 'not contiguous'}, was given; files "
            "are read into and written from contiguous host memory. Copy it there (tensor.cpu().contiguous())."
        )
    if not isinstance(offset, int) or offset < 0:
        raise ArgumentError(f"offset={offset!r}, but it is a whole number of bytes, at least 0. Give the byte to begin at.")
    return tensor.nbytes


def _transfer(request: IoRequest, address: int) -> Transfer:
    file = request.file
    middle = direct_part(request.offset, request.nbytes, address, file.address_alignment)
    is_direct = middle.nbytes > 0
    return Transfer(
        is_write=request.is_write,
        middle_fd=file.direct_fd if is_direct else file.buffered_fd,
        edge_fd=file.buffered_fd,
        offset=request.offset,
        nbytes=request.nbytes,
        address=address,
        middle_start=middle.start_nbytes if is_direct else 0,
        middle_nbytes=middle.nbytes if is_direct else request.nbytes,
    )
