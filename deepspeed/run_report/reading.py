"""From a folder of lines to a run: ranks, attempts, and what could not be read.

    rank-00000.jsonl   S s s s s        S s s s E         S: start, s: steps, E: end
    rank-00001.jsonl   S r r r          S r r r E
                       |- attempt 1 -|  |- attempt 2 -|

A rank starts once in an attempt. In order of time, an attempt ends where a rank that it has starts again, or where a start
tells another number of restarts or ranks.

Files are read while they are written: what follows the last line end is left for later. Does not live here: types of
records (`records`), numbers (`facts`).
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from deepspeed.common.wording import some
from deepspeed.errors import UsageError
from deepspeed.run_report.records import (
    CheckpointRecord,
    End,
    Experts,
    Profile,
    RankStep,
    Record,
    Schedule,
    Start,
    Step,
    record_of,
)

__all__ = ["Attempt", "Run", "RunLogNotFoundError", "RunReader", "Unread", "read_run"]

_FILE = re.compile(r"rank-(\d+)\.jsonl")
_SETTING = '"run_log": {"enabled": true, "output_path": "runs", "job_name": "NAME"}'


class RunLogNotFoundError(UsageError, FileNotFoundError):
    """The folder has no run log; the text says where one may be, or which setting writes one."""


@dataclass(frozen=True)
class Unread:
    """A line that could not be read, and why."""

    file: str
    line: int
    why: str


@dataclass(frozen=True)
class Attempt:
    """What ranks told from one start to the next."""

    starts: Mapping[int, Start]
    """By rank; a rank whose start could not be read is missing."""
    ranks: Mapping[int, tuple[Record, ...]]
    """Every record by rank, in the order written."""

    @property
    def begin(self) -> float:
        """When the first record was written."""
        return min(records[0].time for records in self.ranks.values())

    @property
    def end(self) -> float:
        """The latest time of any record."""
        return max(record.time for records in self.ranks.values() for record in records)

    @property
    def first(self) -> Start | None:
        """The start of the lowest rank that there is."""
        return self.starts[min(self.starts)] if self.starts else None

    @property
    def world_size(self) -> int:
        """How many ranks there should be; at least those that are."""
        told = max((start.world_size or 0 for start in self.starts.values()), default=0)
        return max(told, max(self.ranks) + 1)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of which no record was found."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The reported steps, of the lowest rank that tells any."""
        return self.told_by_one(Step)

    @property
    def rank_steps(self) -> Mapping[int, tuple[RankStep, ...]]:
        """Each rank's own records of steps."""
        return {rank: self._of(rank, RankStep) for rank in sorted(self.ranks)}

    @property
    def ends(self) -> Mapping[int, End]:
        """The last `end` of each rank that has one."""
        found = {rank: self._of(rank, End) for rank in sorted(self.ranks)}
        return {rank: ends[-1] for rank, ends in found.items() if ends}

    def told_by_one(self, kind: type[_R]) -> tuple[_R, ...]:
        """All records of a kind by the lowest rank that has any."""
        return next((found for rank in sorted(self.ranks) if (found := self._of(rank, kind))), ())

    def _of(self, rank: int, kind: type[_R]) -> tuple[_R, ...]:
        found: tuple[_R, ...] = self._by_kind[rank].get(kind, ())  # type: ignore[assignment]
        return found

    @functools.cached_property
    def _by_kind(self) -> dict[int, dict[type, tuple[Record, ...]]]:
        """Each rank's records by kind: a long run has very many, and every fact asks for one kind."""
        found: dict[int, dict[type, list[Record]]] = {}
        for rank, records in self.ranks.items():
            mine = found.setdefault(rank, {})
            for record in records:
                mine.setdefault(type(record), []).append(record)
        return {rank: {kind: tuple(records) for kind, records in mine.items()} for rank, mine in found.items()}


_R = TypeVar("_R", Step, RankStep, Experts, Schedule, CheckpointRecord, Profile, End)


@dataclass(frozen=True)
class Run:
    """All that a folder tells."""

    folder: Path
    attempts: tuple[Attempt, ...]
    unread: tuple[Unread, ...] = ()
    cut_off: tuple[str, ...] = ()
    """Files whose last line has no end: their rank was killed while it wrote, or writes now."""
    unknown_kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name or str(self.folder)

    def told_by_one(self, kind: type[_R]) -> tuple[_R, ...]:
        """All records of a kind, each attempt's by its lowest rank that has any, in the order of attempts."""
        return tuple(record for attempt in self.attempts for record in attempt.told_by_one(kind))


def read_run(run_dir: Path | str) -> Run:
    """Read a folder once.

    Raises:
        RunLogNotFoundError: there is no record in it.
    """
    reader = RunReader(run_dir)
    reader.read_more()
    return reader.run()


class RunReader:
    """Reads what is new in a folder, again and again.

    Args:
        run_dir: the folder that the files of ranks lie in.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.folder = Path(run_dir)
        self._files: dict[int, _RankFile] = {}

    def read_more(self) -> bool:
        """Read complete lines that were appended since the last call; returns whether there were any."""
        is_new = False
        for path in _files_of(self.folder):
            rank = _rank_of(path)
            file = self._files.get(rank)
            if file is None or path.stat().st_size < file.offset:  # shorter: another run began the file anew
                file = self._files[rank] = _RankFile(rank, path)
            is_new |= file.read_more()
        return is_new

    def run(self) -> Run:
        """What has been read so far.

        Raises:
            RunLogNotFoundError: nothing has.
        """
        if not self._files:
            raise RunLogNotFoundError(_nothing_in(self.folder))
        segments = [segment for file in self._files.values() for segment in file.segments if segment.records]
        files = sorted(self._files.values(), key=lambda file: file.rank)
        unread = tuple(each for file in files for each in file.unread)
        if not segments:
            bad = f" ({some([f'{each.file} line {each.line}: {each.why}' for each in unread], 2)})" if unread else ""
            raise RunLogNotFoundError(
                f"{self.folder}: {len(files)} file(s) of ranks without a record that can be read{bad}. A run writes its "
                f"first one when its engine is built, and steps every run_log.every steps: wait for it."
            )
        unknown: Counter[str] = Counter()
        for file in files:
            unknown.update(file.unknown_kinds)
        cut_off = tuple(file.path.name for file in files if file.rest)
        return Run(self.folder, tuple(_attempts(segments)), unread, cut_off, dict(unknown))


@dataclass
class _Segment:
    """The records of one rank from a start to the next; without a start where that line could not be read."""

    rank: int
    start: Start | None = None
    records: list[Record] = field(default_factory=list)


@dataclass
class _RankFile:
    """One file, read from `offset` on; `rest` is a line without an end so far."""

    rank: int
    path: Path
    offset: int = 0
    rest: bytes = b""
    lines: int = 0
    segments: list[_Segment] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    unknown_kinds: Counter[str] = field(default_factory=Counter)

    def read_more(self) -> bool:
        """Read what was appended."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            new = file.read()
        self.offset += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        for line in lines:
            self.lines += 1
            if line.strip():
                self._add(line)
        return bool(lines)

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line, parse_constant=lambda _: None)  # NaN and Infinity, which writers do not write
            if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
                raise ValueError('no object with a "kind"')
            record = record_of(values["kind"], values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            self.unread.append(Unread(self.path.name, self.lines, f"{values['kind']}, {where}: {first['msg']}"))
        except (ValueError, RecursionError) as error:
            self.unread.append(Unread(self.path.name, self.lines, str(error)))
        else:
            if record is None:
                self.unknown_kinds[values["kind"]] += 1
                return
            if isinstance(record, Start) or not self.segments:
                self.segments.append(_Segment(self.rank, record if isinstance(record, Start) else None))
            self.segments[-1].records.append(record)


def _files_of(folder: Path) -> list[Path]:
    """The files of ranks in a folder, in the order of ranks; none where there is no such folder."""
    paths = [path for path in folder.glob("rank-*.jsonl") if _FILE.fullmatch(path.name)]
    return sorted(paths, key=_rank_of)


def _rank_of(path: Path) -> int:
    found = _FILE.fullmatch(path.name)
    assert found is not None  # `_files_of` took no other
    return int(found[1])


def _nothing_in(folder: Path) -> str:
    """The error's text where a folder has no file of a rank."""
    cure = f"Give the folder that a run with {_SETTING} wrote: output_path/job_name."
    if not folder.is_dir():
        return f"{folder}: no such folder. {cure}"
    below = sorted(
        {path.parent for path in folder.glob("*/rank-*.jsonl")}, key=lambda path: path.stat().st_mtime, reverse=True
    )
    if below:
        return f"{folder}: no rank-*.jsonl here, but in {some([str(path) for path in below], 5)}: give one of these."
    return f"{folder}: no rank-*.jsonl in it. {cure}"


def _attempts(segments: Iterable[_Segment]) -> list[Attempt]:
    groups: list[dict[int, _Segment]] = []
    for segment in sorted(segments, key=lambda each: (each.records[0].time, each.rank)):
        if not groups or segment.rank in groups[-1] or _parts(segment.start, groups[-1].values()):
            groups.append({})
        groups[-1][segment.rank] = segment
    return [_attempt(group) for group in groups]


def _parts(start: Start | None, group: Iterable[_Segment]) -> bool:
    """Whether a start belongs to another attempt than those of a group, by what it tells."""
    if start is None:
        return False
    others = [each.start for each in group if each.start is not None]
    return any((start.restarts, start.world_size) != (other.restarts, other.world_size) for other in others)


def _attempt(group: Mapping[int, _Segment]) -> Attempt:
    starts = {rank: segment.start for rank, segment in sorted(group.items()) if segment.start is not None}
    return Attempt(starts, {rank: tuple(segment.records) for rank, segment in sorted(group.items())})
