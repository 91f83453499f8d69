"""The file of one rank, read on from where it ended last time.

    |--- read ---|- new -|- a line without its end -|
                 offset                             size

A file that was cut short, or that has other bytes where it was read, began anew and is read anew. Called by `reading`. Does
not live here: one line (`lines`), runs (`reading`).
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from deepspeed.run_log import Start
from deepspeed.run_report.lines import UnknownKindError, record_of
from deepspeed.run_report.segments import Segment

__all__ = ["RankFile", "Unread"]

_CHUNK = 1 << 20
_LONGEST = 64 << 20  # bytes of a line; what is longer is no line of a log
_REMEMBERED = 64  # bytes before the offset, by which a file is known again
_MOST_UNREAD = 200  # lines of a file that are named


@dataclass(frozen=True)
class Unread:
    """A line that could not be read, and why."""

    file: str
    line: int
    """From 1; 0: the file as a whole."""
    why: str

    @property
    def place(self) -> str:
        """Where in the file it is."""
        return f"line {self.line}" if self.line else "the whole file"

    def __str__(self) -> str:
        """As an error's text has it."""
        return f"{self.file}, {self.place}: {self.why}"


@dataclass
class RankFile:
    """What was read of one file so far."""

    rank: int
    path: Path
    segments: list[Segment] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    """The first 200 of them."""
    unread_count: int = 0
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    _offset: int = 0
    _last: bytes = b""
    _rest: bytes = b""
    _lines: int = 0
    _is_skipping: bool = False
    _seen: tuple[int, int, int] | None = None

    @property
    def is_cut_off(self) -> bool:
        """The last line has no end."""
        return bool(self._rest) or self._is_skipping

    def began_anew(self) -> bool:
        """Whether what was read is no longer there: the file was cut short or replaced.

        Raises:
            OSError: the file cannot be read.
        """
        if self._stamp() == self._seen:
            return False
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                return True
            file.seek(self._offset - len(self._last))
            return file.read(len(self._last)) != self._last

    def read_more(self) -> bool:
        """Read complete lines that were appended; returns whether there were any.

        Raises:
            OSError: the file cannot be read.
        """
        seen, before = self._stamp(), self._lines
        if seen != self._seen:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                self._read(file, os.fstat(file.fileno()).st_size)
            self._seen = seen
        return self._lines > before

    def _stamp(self) -> tuple[int, int, int]:
        """What changes when a file does; of a regular file alone, for opening a pipe would wait for its writer."""
        told = self.path.stat()
        if not stat.S_ISREG(told.st_mode):
            raise OSError(0, "Is a directory" if stat.S_ISDIR(told.st_mode) else "Is no regular file")
        return (told.st_ino, told.st_size, told.st_mtime_ns)

    def _read(self, file: BinaryIO, size: int) -> None:
        """Up to `size`: what is appended meanwhile is left for the next time."""
        while data := file.read(min(_CHUNK, size - self._offset)):
            self._offset += len(data)
            self._last = (self._last + data)[-_REMEMBERED:]
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._lines += 1
                if self._is_skipping:
                    self._is_skipping = False
                elif line.strip():
                    self._add(line)
            if self._is_skipping:
                self._rest = b""
            elif len(self._rest) > _LONGEST:
                self._refuse(self._lines + 1, f"longer than {_LONGEST >> 20} MiB")
                self._is_skipping, self._rest = True, b""

    def _add(self, line: bytes) -> None:
        try:
            record = record_of(line)
        except UnknownKindError as error:
            self.unknown_kinds[error.kind] += 1
        except ValueError as error:
            self._refuse(self._lines, str(error))
        else:
            if isinstance(record, Start) or not self.segments:
                start = record if isinstance(record, Start) else None
                self.segments.append(Segment(self.rank, record.time, start))
            self.segments[-1].add(record)

    def _refuse(self, line: int, why: str) -> None:
        self.unread_count += 1
        if len(self.unread) < _MOST_UNREAD:
            self.unread.append(Unread(self.path.name, line, why))
