"""A folder on a fast disk that lives as long as its process: what rests there is worth nothing to anybody else.

    nvme_path/
        deepspeed-tier-<host>-<pid>-<label>-<token>/      locked by its owner; files of the tier

    claim    lock nvme_path for a moment --> remove folders whose lock is free: their owners are dead --> make ours, lock it
    close    remove it; also at the interpreter's exit

The lock is the system's (`flock` on the folder itself), so it is gone with the process, however that ends, and nothing is
left behind that could block the next start. Folders of other hosts (a shared file system) are left to those.

Lives here: folders. Does not live here: what lies in them (`offload.tier_file`). Called by `engine.build`, once per engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

from deepspeed.common.logging import get_logger
from deepspeed.errors import FileIoError

__all__ = ["SwapFolder"]

_PREFIX = "deepspeed-tier-"

_logger = get_logger(__name__)


class SwapFolder:
    """One process's own folder. Made by `claim`.

    Attributes:
        path: the folder; it exists until `close`.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._remove = weakref.finalize(self, _remove, path, lock, os.getpid())

    @classmethod
    def claim(cls, parent: Path, label: str) -> SwapFolder:
        """Make a folder in `parent`, which is made where it lacks; folders there whose owners are dead are removed first.

        Args:
            parent: on the disk that is to be used, for example `offload_optimizer.nvme_path`.
            label: shown in the folder's name: letters, digits, `_`.

        Raises:
            FileIoError: the system refuses to make it.
        """
        parent = parent.expanduser().absolute()  # the current folder may be another one when it is removed
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with _locked(parent):
                _remove_abandoned(parent)
                path = parent / f"{_own_prefix()}{os.getpid()}-{label}-{secrets.token_hex(4)}"
                path.mkdir(mode=0o700)
                return cls(path, _lock_or_open(path))
        except OSError as error:
            raise FileIoError(
                error.errno or 0,
                f"nvme_path = {str(parent)!r}: no folder could be made there ({error}). Give a directory on a local disk "
                "that this process may write to.",
            ) from error

    def close(self) -> None:
        """Remove the folder with all in it; again: nothing."""
        self._remove()


def _own_prefix() -> str:
    return f"{_PREFIX}{re.sub(r'[^A-Za-z0-9.]', '_', socket.gethostname())}-"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else on this host makes or removes folders in `folder` meanwhile, where the file system has locks.

    A process that is killed here leaves no lock behind.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _lock_or_open(folder: Path) -> int:
    """A descriptor of `folder` that holds its lock, where the file system has locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _logger.warning(
            "%s has no locks (%s): should this process be killed, the next one cannot tell and leaves the folder. Remove it "
            "by hand then.",
            folder,
            error,
        )
    return fd


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this host that nobody holds the lock of."""
    for folder in sorted(parent.glob(f"{_own_prefix()}*")):
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:  # removed by its owner just now, or another user's
            _logger.debug("%s is left alone: %s", folder, error)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # its owner lives, or the file system has no locks
            _logger.debug("%s is in use: %s", folder, error)
        else:
            _logger.info("removing %s: the process that it belonged to is gone", folder)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _remove(path: Path, lock: int, owner_pid: int) -> None:
    """End of a folder. A process that was forked from the owner leaves it alone."""
    if os.getpid() != owner_pid:
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        _logger.warning("%s could not be removed. Remove it by hand.", path)
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_UN)  # also where a forked process has it open too
    os.close(lock)
