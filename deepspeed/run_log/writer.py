"""One rank's file of a run log: records are appended, and are with the operating system when `write` returns.

So a run that is killed keeps all of its records but, at worst, the end of the last line; whoever appends next begins a line
of its own. Engines of one process that are there at the same time (a teacher and a student) have a folder each:

    RUN_DIR/rank-00000.jsonl             the first engine; a later one, once the first has ended
    RUN_DIR/engine-2/rank-00000.jsonl    one that was made while the first was there

Called by `engine.step_log`.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

from deepspeed.common.logging import warn_once
from deepspeed.errors import ArgumentError
from deepspeed.run_log.records import Record, line_of

__all__ = ["RunLogWriter", "engine_folder", "file_name", "free_engine"]

_writers: weakref.WeakSet[RunLogWriter] = weakref.WeakSet()
"""Of this process; a forked child leaves its parent's files alone."""


def file_name(rank: int) -> str:
    """Name of a rank's file in the folder of the run."""
    return f"rank-{rank:05d}.jsonl"


def engine_folder(folder: Path, engine: int) -> Path:
    """Where an engine's files lie in the folder of the run: the first one's (1) in the folder itself."""
    return folder if engine == 1 else folder / f"engine-{engine}"


def free_engine(folder: Path, rank: int) -> int:
    """The least number whose file no engine of this process writes now."""
    taken = {writer.path for writer in _writers if writer.is_open}
    return next(n for n in itertools.count(1) if engine_folder(folder, n).absolute() / file_name(rank) not in taken)


class RunLogWriter:
    """Appends records to one file.

    Args:
        folder: of the run; made when it lacks.
        rank: whose records these are.
        clock_seconds: seconds since 1970.

    Raises:
        ArgumentError: the file cannot be opened.
    """

    def __init__(self, folder: Path, rank: int, clock_seconds: Callable[[], float] = time.time) -> None:
        self.path = folder.absolute() / file_name(rank)
        self._clock_seconds = clock_seconds
        self._owner_pid = os.getpid()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] | None = self.path.open("ab", buffering=0)
            self._was_cut = _is_cut(self.path)
        except OSError as error:
            raise ArgumentError(
                f"run_log: {self.path} cannot be opened for appending: {error.strerror}. Give a folder that every rank can "
                "write to in run_log.output_path, or leave the block out."
            ) from error
        _writers.add(self)

    @property
    def is_open(self) -> bool:
        """Whether records are taken still."""
        return self._file is not None

    def write(self, *records: Record) -> None:
        """Append records, together; nothing once closed, nor in a forked child, whose end is not the run's.

        A log is no reason to end a run: where the file takes no more, that is said once, and nothing follows.
        """
        if self._file is None or os.getpid() != self._owner_pid:
            return
        now = self._clock_seconds()
        lines = [line_of(record, now) + "\n" for record in records]
        text = ("\n" if self._was_cut else "") + "".join(lines)
        self._was_cut = False
        try:
            _write_all(self._file, text.encode())
        except OSError as error:
            self.close()
            warn_once(
                ("run_log", str(self.path)),
                "run_log: %s takes no more records (%s): this rank writes none from here on, and training goes on. Make "
                "room, or give another folder in run_log.output_path, before the next run.",
                self.path,
                error.strerror,
                ranks=[-1],
            )

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _write_all(file: IO[bytes], data: bytes) -> None:
    """One system call as a rule, so that records of two engines on one file do not mix."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _is_cut(path: Path) -> bool:
    """Whether the last line lacks its end: a run was killed in the middle of it."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
