"""Bytes on a disk: the few operations that a save needs, each durable when it returns.

Lives here: files, folders, renames, fsync. Does not live here: names, order of operations (`folders`, `save.writer`).
`Storage` is the local (or mounted) file system, and the seam at which tests inject a full disk or a killed process.

[Note: past the page cache] A file that will be flushed anyway gains nothing from the page cache: its bytes are copied there,
wait, and drive out what the training has cached. So files are written directly (O_DIRECT) where the file system can, from
blocks that are filled and hashed while the block before is on its way to the disk. Elsewhere they take the usual way.

[Note: hash what is near] A hash of bytes in the cache takes a quarter of the time of one that reads memory. So bytes are
copied (into a block, or by the system) in small parts, and each part is hashed right after its copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import mmap
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import xxhash
from typing_extensions import Self

from deepspeed.checkpoint.disk.manifest import BLOCK_NBYTES, FileEntry

__all__ = ["HashedFile", "Lock", "Storage", "WriteOptions", "Written", "announce_run", "cure_of", "open_run"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NEAR_NBYTES = 256 << 10
"""Bytes copied and then hashed at a time: they fit into a core's own cache twice."""

_ALIGNMENT_NBYTES = mmap.PAGESIZE
"""Direct writes begin and end at multiples of this, in the file and in memory; no disk in use asks for more."""


@dataclass(frozen=True)
class WriteOptions:
    """How bytes get to the disk; what gets there is the same."""

    block_nbytes: int = 8 << 20
    """Bytes per block, rounded up to whole pages. One block is one write of the system."""

    block_count: int = 2
    """Blocks per file: one is filled while the others are being written. 1: filling and writing take turns."""

    is_direct: bool = True
    """Write past the page cache where the file system can ([Note: past the page cache])."""

    @property
    def aligned_block_nbytes(self) -> int:
        """`block_nbytes`, rounded up to whole pages."""
        return -(-self.block_nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


@dataclass
class Written:
    """What went through a `Storage` so far, all finished files together."""

    nbytes: int = 0
    seconds: float = 0.0
    """From the creation of each file until it was on the disk."""

    hash_seconds: float = 0.0
    """Processor time in the hash; most of it passes while a block is being written."""


class HashedFile:
    """A new file that is hashed while it is written. Leaving the context closes it; `finish` makes it durable."""

    def __init__(self, path: Path, options: WriteOptions | None = None, written: Written | None = None) -> None:
        options = options or WriteOptions()
        self._began = time.perf_counter()
        self._written = written or Written()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._block_hash = xxhash.xxh3_64()
        self._block_digests: list[str] = []
        self._hashed_nbytes = 0
        self._nbytes = 0
        self._hash_seconds = 0.0
        self._blocks = _Blocks(self._fd, options) if options.is_direct and _set_direct(self._fd, True) else None

    def write(self, data: memoryview) -> None:
        """Append all of `data`, which may change afterwards. An error of the system may also come from a later call."""
        self._nbytes += len(data)
        for start in range(0, len(data), _NEAR_NBYTES):  # [Note: hash what is near]
            part = data[start : start + _NEAR_NBYTES]
            if self._blocks is not None:
                self._blocks.write(part, self._hash_near)
            else:
                _write_all(self._fd, part)
                self._hash_near(part)

    def _hash_near(self, part: memoryview) -> None:
        began = time.thread_time()
        while part:
            here = part[: BLOCK_NBYTES - self._hashed_nbytes % BLOCK_NBYTES]
            self._block_hash.update(here)
            self._hashed_nbytes += len(here)
            part = part[len(here) :]
            if self._hashed_nbytes % BLOCK_NBYTES == 0:
                self._end_block()
        self._hash_seconds += time.thread_time() - began

    def _end_block(self) -> None:
        self._block_digests.append(self._block_hash.hexdigest())
        self._block_hash.reset()

    def finish(self) -> FileEntry:
        """Flush to the disk and say what the file is."""
        if self._blocks is not None:
            self._blocks.finish()
        os.fsync(self._fd)
        self._written.nbytes += self._nbytes
        self._written.seconds += time.perf_counter() - self._began
        self._written.hash_seconds += self._hash_seconds
        if self._hashed_nbytes % BLOCK_NBYTES:
            self._end_block()
        return FileEntry(nbytes=self._nbytes, blocks=self._block_digests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._blocks is not None:
            self._blocks.close()
        os.close(self._fd)


class _Blocks:
    """Direct writes of one file, in order: blocks are filled by the caller and written by one thread.

        free --- write() fills it ---> full, queued for the thread ---> on the disk: free again

    An error of the thread is raised when its block is waited for. A plain thread and not a pool: pools take no work any more
    when the interpreter ends, and a background save must still come to its end then.
    """

    def __init__(self, fd: int, options: WriteOptions) -> None:
        self._fd = fd
        self._block_nbytes = options.aligned_block_nbytes
        self._unmade = max(1, options.block_count)
        self._full: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[memoryview | Exception] = queue.SimpleQueue()
        self._writing = 0
        self._block = self._new_block()
        self._filled_nbytes = 0
        self._thread: threading.Thread | None = None  # small files need none

    def write(self, data: memoryview, seen: Callable[[memoryview], None]) -> None:
        """Append `data`; `seen` is shown the copy of each part of it."""
        while data:
            count = min(len(data), self._block_nbytes - self._filled_nbytes)
            place = self._block[self._filled_nbytes : self._filled_nbytes + count]
            place[:] = data[:count]
            seen(place)
            self._filled_nbytes += count
            data = data[count:]
            if self._filled_nbytes == self._block_nbytes:
                self._submit()
                self._block, self._filled_nbytes = self._new_block() if self._unmade else self._wait(), 0

    def finish(self) -> None:
        """Wait for all blocks and write what is left, which need not end at a page."""
        while self._writing:
            self._wait()
        _set_direct(self._fd, False)
        _write_all(self._fd, self._block[: self._filled_nbytes])

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()

    def _submit(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer")
            self._thread.start()
        self._full.put(self._block)
        self._writing += 1

    def _work(self) -> None:
        """Write blocks until told to end. After an error nothing more is written."""
        failure: Exception | None = None
        while (block := self._full.get()) is not None:
            try:
                if failure is None:
                    _write_all(self._fd, block)
            except Exception as error:  # the thread's boundary: raised again by `_wait`
                failure = error
            self._done.put(failure or block)

    def _wait(self) -> memoryview:
        done = self._done.get()
        self._writing -= 1
        if isinstance(done, Exception):
            raise done
        return done

    def _new_block(self) -> memoryview:
        self._unmade -= 1
        pages = mmap.mmap(-1, self._block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(pages)  # begins at a page; takes memory with the first touch


def _write_all(fd: int, data: memoryview) -> None:
    """Append all of `data`; through the page cache from the first direct write on that the system finds unfit."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(fd, False):
                raise


def _set_direct(fd: int, on: bool) -> bool:
    """Let writes go past the page cache, or not. False when that changes nothing: it was so, or the system cannot."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | _DIRECT if on else flags & ~_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return wanted != flags


def open_run(path: Path) -> io.FileIO:
    """Open a file to read a long run of it: the system is asked to read further ahead than it would by itself."""
    file = path.open("rb", buffering=0)
    announce_run(file.fileno())
    return file


def announce_run(fd: int) -> None:
    """Ask the system to read further ahead of an open file than it would by itself."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


class Lock:
    """Says that a live process works in a folder; the system drops it when the process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Give the folder free, also where a process that was forked meanwhile (a loader's worker) has it open too."""
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def cure_of(error: OSError) -> str:
    """What to do when the system refused to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space, or give another folder, and try again."
    if error.errno == errno.ENOENT:
        return "A folder on the way is not there: it must be on a file system that all ranks see."
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "A file stands where a folder is needed. Remove it, or give another folder or tag."
    return "Correct the cause and try again."


class Storage:
    """The file system. Every method raises OSError when the system refuses.

    Attributes:
        is_kept: what is written can be read afterwards.
    """

    is_kept: ClassVar[bool] = True

    def __init__(self, options: WriteOptions | None = None) -> None:
        self.options = options or WriteOptions()
        self.written = Written()

    def make_folder(self, path: Path) -> None:
        """Create one new folder; its parents are created where they lack."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()

    def is_folder(self, path: Path) -> bool:
        """Whether a folder that was made is still there."""
        return path.is_dir()

    def create(self, path: Path) -> HashedFile:
        """Open a new file."""
        return HashedFile(path, self.options, self.written)

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
        """Remove a file, a link or a whole folder, also while another process removes it."""
        while path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
        path.unlink(missing_ok=True)

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
