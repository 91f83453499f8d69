"""A folder for the files of a measurement: its space is checked before, and nothing of it is left after.

Called by the commands of this room. "After" is also after Ctrl-C and SIGTERM. What a killed process leaves is removed by
the next that measures there: each folder is locked while its owner lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deepspeed.errors import FileIoError
from deepspeed.nvme.sizes import show_nbytes

__all__ = ["scratch_folders"]

_PREFIX = "deepspeed-io-test-"
_YOUNG_SECONDS = 10.0


@contextmanager
def scratch_folders(needs: dict[Path, int]) -> Iterator[dict[Path, Path]]:
    """Make a folder inside each key of `needs`, for so many bytes of files; remove them in the end.

    Yields:
        given folder -> folder in it.

    Raises:
        FileIoError: a folder is not there or not writable, or its disk has not the space; nothing has happened then.
    """
    disks = _by_disk(needs)
    for folder in needs:
        _remove_left_over(folder)
    for folder, nbytes in disks.items():
        _check(folder, nbytes)
    made: dict[Path, Path] = {}
    locks: list[int] = []
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for folder in needs:
            made[folder] = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
            locks.append(_lock(made[folder]))
        yield made
    finally:
        for scratch in made.values():
            shutil.rmtree(scratch, ignore_errors=True)
        for lock in locks:
            os.close(lock)
        signal.signal(signal.SIGTERM, before)


def _lock(folder: Path) -> int:
    """Lock a folder until the descriptor is closed, or its process ends.

    Raises:
        BlockingIOError: another process has it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_left_over(folder: Path) -> None:
    """Remove what killed processes left; one that began a moment ago, and has not locked its folder yet, is spared."""
    for left in folder.glob(f"{_PREFIX}*"):
        try:
            if time.time() - left.stat().st_mtime < _YOUNG_SECONDS:
                continue
            lock = _lock(left)
        except OSError:  # in use, gone meanwhile, or somebody else's
            continue
        shutil.rmtree(left, ignore_errors=True)
        os.close(lock)


def _leave(number: int, frame: FrameType | None) -> None:
    """End by an exception, so that everything is tidied up on the way."""
    raise SystemExit(128 + number)


def _by_disk(needs: dict[Path, int]) -> dict[Path, int]:
    """One folder of each disk, and what all folders on it need."""
    disks: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in needs.items():
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise FileIoError(
                errno.ENOENT, f"{folder} is not a folder that this user may write to. Make it, or give another folder."
            )
        disk = folder.stat().st_dev
        first, so_far = disks.get(disk, (folder, 0))
        disks[disk] = (first, so_far + nbytes)
    return dict(disks.values())


def _check(folder: Path, nbytes: int) -> None:
    free_nbytes = shutil.disk_usage(folder).free
    if nbytes > free_nbytes:
        raise FileIoError(
            errno.ENOSPC,
            f"the files need {show_nbytes(nbytes)} ({nbytes} bytes) in {folder}, and {free_nbytes} bytes are free there. "
            "Give a smaller --io_size, fewer processes, or another folder.",
        )
