"""The file that tells other programs the process id of a job's launcher (`--save_pid`), for the life of the job.

`launch` writes it; `runner` removes it after a launcher that could not.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError

__all__ = ["pid_file", "pid_path", "remove_stale"]

logger = get_logger(__name__)


def pid_path(runner_pid: int) -> Path:
    """The file of the job that the runner with this process id started."""
    return Path(tempfile.gettempdir()) / f"{runner_pid}.ds"


def remove_stale(runner_pid: int) -> None:
    """Remove our runner's file after a launcher that was killed could not; one that is somebody else's stays."""
    path = pid_path(runner_pid)
    try:
        if path.stat().st_uid == os.getuid():
            path.unlink()
    except FileNotFoundError:
        return


@contextlib.contextmanager
def pid_file(runner_pid: int) -> Iterator[None]:
    """Within the context, hold our process id in `pid_path(runner_pid)`; 0 means no file.

    Raises:
        LaunchError: the file is there already.
    """
    if not runner_pid:
        yield
        return
    path = pid_path(runner_pid)
    try:
        with path.open("x") as file:  # never follows what somebody else put there
            file.write(str(os.getpid()))
    except FileExistsError:
        raise LaunchError(f"--save_pid: {path} is there already, from an earlier job: remove it.") from None
    logger.info("launcher pid: %d (in %s)", os.getpid(), path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
