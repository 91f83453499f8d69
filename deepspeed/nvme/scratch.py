"""A folder for the files of a measurement: its space is checked before, and nothing of it is left after.

Called by the commands of this room. "After" is also after Ctrl-C and SIGTERM; a killed process leaves the folder, whose
name says what it is.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deepspeed.errors import FileIoError
from deepspeed.nvme.sizes import show_nbytes

__all__ = ["scratch_folders"]

_PREFIX = "deepspeed-io-test-"


@contextmanager
def scratch_folders(needs: dict[Path, int]) -> Iterator[dict[Path, Path]]:
    """Make a folder inside each key of `needs`, for so many bytes of files; remove them in the end.

    Yields:
        given folder -> folder in it.

    Raises:
        FileIoError: a folder is not there or not writable, or its disk has not the space; nothing has happened then.
    """
    for folder, nbytes in _by_disk(needs).items():
        _check(folder, nbytes)
    made: dict[Path, Path] = {}
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for folder in needs:
            made[folder] = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        yield made
    finally:
        for scratch in made.values():
            shutil.rmtree(scratch, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


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
