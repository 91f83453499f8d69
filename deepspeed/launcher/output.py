"""What ranks print: passed on as it comes, with the last lines of each rank remembered for the report of a failure.

    rank's stdout, stderr --pty or pipe--> pump (a thread each) --> the launcher's own stdout, stderr
                                             |
                                             +--> last bytes

[Note: a rank cannot tell] A stream of ours that is a terminal is a terminal for the rank too (progress bars, colours); when
both our streams are the same file, the rank's are one stream, so that its lines keep their order. With a log folder a
rank writes to its file directly.

Does not live here: processes (`processes`), the report (`launch`, which calls it).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import select
import termios
import threading
import time
import tty
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from deepspeed.errors import LaunchError

__all__ = ["LogFile", "LogFolderError", "PassedOn", "RankOutput", "finish", "free_note", "last_lines", "log_paths"]

_TAIL_NBYTES = 16384
_TAIL_LINES = 20
_STUCK_SECONDS = 3.0
_OPEN_SECONDS = 0.25


class LogFolderError(LaunchError, ValueError):
    """The folder for the logs of ranks cannot be used."""


class RankOutput(Protocol):
    """Where one rank's output goes."""

    def streams(self) -> tuple[int, int]:
        """File descriptors that the rank gets as its stdout and stderr."""

    def started(self) -> None:
        """Called once the rank has the descriptors."""

    def is_finished(self) -> bool:
        """Whether what the rank wrote has arrived, or will not; called again and again once all that write have ended."""

    def tail(self) -> str:
        """The last lines the rank wrote; called once it is finished."""


class PassedOn:
    """Output passed on to the launcher's own streams."""

    def __init__(self) -> None:
        is_one = os.path.sameopenfile(1, 2)
        self._pumps = [_Pump(1)] if is_one else [_Pump(1), _Pump(2)]

    def streams(self) -> tuple[int, int]:
        """See `RankOutput`."""
        return self._pumps[0].given, self._pumps[-1].given

    def started(self) -> None:
        """See `RankOutput`."""
        for pump in self._pumps:
            pump.start()

    def is_finished(self) -> bool:
        """See `RankOutput`."""
        finished = [pump.is_finished() for pump in self._pumps]  # all are asked, as each waits from the first time on
        return all(finished)

    def tail(self) -> str:
        """See `RankOutput`."""
        return "\n".join(filter(None, (last_lines(pump.seen()) for pump in self._pumps)))


def finish(outputs: Sequence[RankOutput], pause: Callable[[float], object]) -> None:
    """Return when what ranks wrote has arrived, or will not; call it once they and all they started have ended.

    Args:
        outputs: of the ranks.
        pause: waits so many seconds.
    """
    while [output for output in outputs if not output.is_finished()]:
        pause(0.01)


class LogFile:
    """Output written to a file that holds both streams.

    Raises:
        LogFolderError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LogFolderError(f"--enable_each_rank_log: {path}: {error.strerror}; give a writable folder.") from error

    def streams(self) -> tuple[int, int]:
        """See `RankOutput`."""
        return self._fd, self._fd

    def started(self) -> None:
        """See `RankOutput`."""
        os.close(self._fd)

    def is_finished(self) -> bool:
        """See `RankOutput`. The rank has written to the file itself."""
        return True

    def tail(self) -> str:
        """See `RankOutput`."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _TAIL_NBYTES))
            return last_lines(file.read())


class _Pump(threading.Thread):
    """Copies one stream of a rank to the launcher's descriptor `target`."""

    def __init__(self, target: int) -> None:
        super().__init__(name=f"output-{target}", daemon=True)
        self._target = target
        self._source, self.given = _terminal_like(target) if os.isatty(target) else os.pipe()
        self._seen = b""
        self._moved_nbytes = 0
        self._waited_at: tuple[int, float] | None = None  # with so many bytes moved, since when

    def start(self) -> None:
        os.close(self.given)  # the rank's copy is now the only one, so its end is the end of the stream
        super().start()

    def run(self) -> None:
        # OSError: a terminal whose last writer is gone reads EIO; a target whose reader is gone, as in `deepspeed ... |
        # head`, writes EPIPE. Closing the source then tells the rank the same.
        with contextlib.suppress(OSError):
            while chunk := os.read(self._source, 65536):
                self._seen = (self._seen + chunk)[-_TAIL_NBYTES:]
                while chunk:
                    moved_nbytes = self._written(chunk)
                    self._moved_nbytes += moved_nbytes
                    chunk = chunk[moved_nbytes:]
        os.close(self._source)

    def _written(self, chunk: bytes) -> int:
        """How much of `chunk` our stream has taken; blocks until it takes some."""
        try:
            return os.write(self._target, chunk)
        except BlockingIOError:  # another program that has the stream too made it so, and it is full
            poll = select.poll()
            poll.register(self._target, select.POLLOUT)
            poll.poll()
            return 0

    def is_finished(self) -> bool:
        """Whether the end of the stream, which comes when all writers have ended, is there, or is waited for in vain.

        In vain where our own stream takes nothing for `_STUCK_SECONDS` (a stopped pager), and where somebody outside the job
        holds the rank's stream: it is then open and empty.
        """
        now = time.monotonic()
        if self._waited_at is None or self._waited_at[0] != self._moved_nbytes:
            self._waited_at = (self._moved_nbytes, now)
        patience = _STUCK_SECONDS if self.is_alive() and _is_readable(self._source) else _OPEN_SECONDS
        return not self.is_alive() or now - self._waited_at[1] > patience

    def seen(self) -> bytes:
        return self._seen


def _is_readable(fd: int) -> bool:
    """Whether something, or the end, can be read from `fd` now."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _terminal_like(target: int) -> tuple[int, int]:
    """A raw pseudo-terminal of the size of `target`: (our end, the rank's end)."""
    ours, given = os.openpty()
    tty.setraw(given)
    fcntl.ioctl(given, termios.TIOCSWINSZ, fcntl.ioctl(target, termios.TIOCGWINSZ, b"\0" * 8))
    return ours, given


def last_lines(written: bytes, count: int = _TAIL_LINES) -> str:
    """The last `count` lines of `written` that are not blank; of a progress bar, only its last state."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in written.decode(errors="replace").split("\n")]
    return "\n".join([line for line in lines if line.strip()][-count:])


def free_note(path: Path) -> str:
    """What to add about the disk of `path` when it is full, as that may be why a rank failed; else nothing."""
    disk = os.statvfs(path)
    return "; its disk is full" if disk.f_bavail * disk.f_frsize < _TAIL_NBYTES else ""


def log_paths(folder: Path, ranks: list[int], now: datetime.datetime) -> list[Path]:
    """One path per rank, `YYYYmmddHHMMSS_rank<N>.log`; makes `folder`.

    Raises:
        LogFolderError: when `folder` is a file or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogFolderError(f"--enable_each_rank_log {folder}: {error.strerror}; give a writable folder.") from error
    return [folder / f"{now:%Y%m%d%H%M%S}_rank{rank}.log" for rank in ranks]
