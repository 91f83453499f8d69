"""Files as the engine sees them: opened twice, with and without the page cache, and with their space reserved.

Lives here: `IoFile`, opening, reserving, and the texts of errors about files. Does not live here: transfers (`engine`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from deepspeed.errors import FileIoError
from deepspeed.ops.aio.ranges import PAGE_NBYTES

__all__ = ["Creation", "IoFile", "cure_of", "open_file"]

_DIRECT = getattr(os, "O_DIRECT", 0)
_AT_FDCWD = -100
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY)
_STAT_BLOCK_NBYTES = 512  # the unit of st_blocks
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
_DIO_OFFSET = 0x98  # of stx_dio_mem_align in struct statx

_CURES = {
    errno.ENOSPC: "Free space, or give a folder on a larger disk.",
    errno.EDQUOT: "Raise the quota, free space, or give another folder.",
    errno.EFBIG: "Raise the limit on file sizes (`ulimit -f`), or use a file system that allows files of this length.",
    errno.EIO: "The disk or its connection failed: look into the kernel's log, and use another disk.",
    errno.ENODATA: "The file is not what was written: write it again, or give the right file.",
    errno.EBADF: "Open the file for this, and close it when the requests are done.",
    errno.EACCES: "Give a folder and files that this user may read and write.",
    errno.EROFS: "Give a folder on a disk that is mounted for writing.",
    errno.EMFILE: "Each open file takes two descriptors: wait for requests and close files before more are opened, or raise "
    "the limit (`ulimit -n`).",
    errno.ENFILE: "The whole system has no more open files to give: close some, or raise fs.file-max.",
    errno.EISDIR: "Give the path of a file in it.",
    errno.ENOENT: "Give a path that exists, or create=True for a new file in a folder that exists.",
}


def cure_of(number: int) -> str:
    """What to do about an errno."""
    return _CURES.get(number, "Correct the cause and try again.")


class IoFile:
    """A file for an `IoEngine`. Leaving the context closes it.

    Attributes:
        path: as it was opened.
        buffered_fd: its descriptor through the page cache.
        direct_fd: the one past the page cache; -1 where the file system has no such way.
        address_alignment: what direct access asks of addresses, bytes; 0 where there is none.
        is_writable: False where the system allows reading only.
    """

    def __init__(self, path: Path, buffered_fd: int, is_writable: bool, drain: Callable[[IoFile], None]) -> None:
        """Store a descriptor, which the file closes, and what waits for the requests in flight on it."""
        self.path = path
        self.buffered_fd = buffered_fd
        self.direct_fd = -1
        self.address_alignment = 0
        self.is_writable = is_writable
        self._drain = drain

    def open_direct(self) -> None:
        """Find the way past the page cache, if the file system has one.

        Raises:
            FileIoError: it has, but the file cannot be opened again.
        """
        self.direct_fd = _open_direct(self.path, self.is_writable)
        self.address_alignment = _address_alignment(self.path) if self.direct_fd >= 0 else 0

    def is_of(self, drain: Callable[[IoFile], None]) -> bool:
        """Whether this is what waits for its requests."""
        return self._drain == drain

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.buffered_fd < 0

    @property
    def nbytes(self) -> int:
        """Length of the file now.

        Raises:
            FileIoError: it is closed.
        """
        if self.is_closed:
            raise FileIoError(errno.EBADF, f"the file {self.path} is closed, its length was asked for. Ask before close().")
        return os.fstat(self.buffered_fd).st_size

    def sync(self) -> None:
        """Return when what was written, and waited for, is on the disk.

        Raises:
            FileIoError: it is closed, or the disk failed; earlier writes may be lost then.
        """
        try:
            os.fdatasync(self.buffered_fd)
        except OSError as error:
            number = error.errno or errno.EIO
            raise FileIoError(
                number, f"cannot bring {self.path} to its disk: {os.strerror(number)}. {cure_of(number)}"
            ) from error

    def truncate(self, nbytes: int) -> None:
        """Cut the file, or let it grow with zeros, to this length. Nothing may be in flight.

        Raises:
            FileIoError: it is closed, or the system refuses.
        """
        try:
            os.ftruncate(self.buffered_fd, nbytes)
        except OSError as error:
            number = error.errno or errno.EIO
            raise FileIoError(
                number, f"cannot make {self.path} {nbytes} bytes long: {os.strerror(number)}. {cure_of(number)}"
            ) from error

    def close(self) -> None:
        """Wait for the requests in flight on this file and close it. Again: nothing."""
        if not self.is_closed:
            self._drain(self)
            self._close_fds()

    def _close_fds(self) -> None:
        fds, self.buffered_fd, self.direct_fd = (self.buffered_fd, self.direct_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "buffered_fd"):
            self._close_fds()  # a request in flight would hold the file


class Creation(Enum):
    """What opening does with a file that is, or is not, there; the values are flags of the system."""

    NONE = 0
    KEEP = os.O_CREAT
    EMPTY = os.O_CREAT | os.O_TRUNC

    @classmethod
    def of(cls, create: bool, keep: bool) -> Creation:
        """The one that `IoEngine.open` was asked for."""
        if not create:
            return cls.NONE
        return cls.KEEP if keep else cls.EMPTY


def open_file(path: Path, nbytes: int | None, creation: Creation, drain: Callable[[IoFile], None]) -> IoFile:
    """Open `path` both ways. See `IoEngine.open`; `drain` waits for the requests in flight on a file."""
    fd, is_writable = _open(path, creation)
    file = IoFile(path, fd, is_writable, drain)
    try:
        file.open_direct()
        if creation is not Creation.NONE:
            _reserve(file, nbytes or 0)
        elif nbytes is not None and file.nbytes < nbytes:
            raise FileIoError(
                errno.ENODATA, f"{path} has {file.nbytes} bytes, but {nbytes} were needed. {cure_of(errno.ENODATA)}"
            )
    except BaseException:
        file.close()
        if creation is Creation.EMPTY:
            path.unlink(missing_ok=True)
        raise
    return file


def _open(path: Path, creation: Creation) -> tuple[int, bool]:
    """A descriptor through the page cache, and whether it can be written to."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | creation.value, 0o666), True
    except OSError as error:
        if creation is not Creation.NONE or error.errno not in _READ_ONLY:
            raise _refusal("open" if creation is Creation.NONE else "create", path, error) from error
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
    except OSError as error:
        raise _refusal("open", path, error) from error


def _refusal(did: str, path: Path, error: OSError) -> FileIoError:
    number = error.errno or errno.EIO
    return FileIoError(number, f"cannot {did} {path}: {os.strerror(number)}. {cure_of(number)}")


def _open_direct(path: Path, is_writable: bool) -> int:
    if not _DIRECT:
        return -1
    try:
        return os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system has only the way through the page cache
            return -1
        raise _refusal("open", path, error) from error


def _address_alignment(path: Path) -> int:
    """What the file system says that direct access asks of addresses; whole pages where it does not say."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, found) != 0:
        return PAGE_NBYTES
    (mask,) = struct.unpack_from("=I", found.raw, 0)
    alignment, offset_alignment = struct.unpack_from("=II", found.raw, _DIO_OFFSET)
    if not mask & _STATX_DIOALIGN or alignment == 0 or offset_alignment > PAGE_NBYTES:
        return PAGE_NBYTES
    return int(alignment)


def _reserve(file: IoFile, nbytes: int) -> None:
    """Take the space of `nbytes` bytes now, so that no write of them meets a full disk."""
    if nbytes == 0:
        return
    disk = os.statvfs(file.path)
    free_nbytes = disk.f_bavail * disk.f_frsize
    missing_nbytes = nbytes - os.fstat(file.buffered_fd).st_blocks * _STAT_BLOCK_NBYTES
    number = errno.ENOSPC if missing_nbytes > free_nbytes else _allocate(file.buffered_fd, nbytes)
    if number:
        have = f"{file.path} needs {nbytes} bytes, {free_nbytes} are free on its disk"
        raise FileIoError(number, f"{have}: {os.strerror(number)}. {cure_of(number)}")


def _allocate(fd: int, nbytes: int) -> int:
    """`fallocate`, or the length alone where the file system cannot reserve (the C library would write zeros there)."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:  # not this C library
        with contextlib.suppress(AttributeError):
            os.posix_fallocate(fd, 0, nbytes)
            return 0
    elif fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
        return 0
    elif ctypes.get_errno() != errno.EOPNOTSUPP:
        return ctypes.get_errno()
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
