"""Bytes on a disk: the few operations that a save needs, each durable when it returns.

Lives here: files, folders, renames, fsync. Does not live here: names, order of operations (folders, writer). `Storage` is
the local (or mounted) file system, and the seam at which tests inject a full disk or a killed process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

import xxhash
from typing_extensions import Self

from deepspeed.checkpoint.manifest import FileEntry

__all__ = ["HashedFile", "Lock", "Storage"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class HashedFile:
    """A new file that is hashed while it is written. Leaving the context closes it; `finish` makes it durable."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash = xxhash.xxh3_128()
        self._nbytes = 0

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        self._hash.update(data)
        self._nbytes += len(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def finish(self) -> FileEntry:
        """Flush to the disk and say what the file is."""
        os.fsync(self._fd)
        return FileEntry(nbytes=self._nbytes, xxh3_128=self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)


class Lock:
    """Says that a live process works in a folder; the system drops it when the process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Give the folder free."""
        os.close(self._fd)


class Storage:
    """The file system. Every method raises OSError when the system refuses."""

    def make_folder(self, path: Path) -> None:
        """Create one new folder; its parents are created where they lack."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()

    def create(self, path: Path) -> HashedFile:
        """Open a new file."""
        return HashedFile(path)

    def write_file(self, path: Path, data: bytes) -> FileEntry:
        """Create a file with all of `data` in it."""
        with self.create(path) as file:
            file.write(memoryview(data))
            return file.finish()

    def sync_folder(self, path: Path) -> None:
        """Make creations and renames inside `path` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename in one step; a file at `target` is replaced."""
        os.replace(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Let two paths swap what they name in one step; False when this system cannot (nothing happened then)."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in _NO_EXCHANGE:
            return False
        raise OSError(number, os.strerror(number), str(one), None, str(other))

    def remove(self, path: Path) -> None:
        """Remove a file, a link or a whole folder."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def lock(self, path: Path) -> Lock | None:
        """Take the lock of a file or folder; None when another live process holds it.

        A file system without locks gives every caller the lock.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:  # the file system has no locks
            return Lock(fd)
        return Lock(fd)
