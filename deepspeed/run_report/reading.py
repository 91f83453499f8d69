"""From a folder of lines to a run: ranks, attempts, and what could not be read.

    rank-00000.jsonl   S s s s s        S s s s E         S: start, s: steps, E: end
    rank-00001.jsonl   S r r r          S r r r E
                       |- attempt 1 -|  |- attempt 2 -|

A rank starts once in an attempt. In order of time, an attempt ends where a rank that it has starts again, or where a start
tells another number of restarts or ranks. Within a file lines count in their order, for a clock may be set back. Where all
ranks started equally often, the first starts belong together, and so on, however far the clocks of hosts are apart.

Attempts that go on where an earlier one stopped are one run. A launch that begins with the first step again, without a
checkpoint, under the same name, is a run of its own; readers show the newest unless asked for another.

Does not live here: files (`files`), what a rank told in an attempt (`segments`), numbers (`facts`).
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from deepspeed.common.wording import some
from deepspeed.errors import UsageError
from deepspeed.run_log import Checkpoint, End, Profile, Schedule, Start
from deepspeed.run_report.columns import Table
from deepspeed.run_report.files import RankFile, Unread
from deepspeed.run_report.segments import STEP, Segment

__all__ = ["Attempt", "Run", "RunLogNotFoundError", "RunReader", "Unread", "read_run"]

_SHOWN = 9  # ranks that lack; no text names more
_FILE = re.compile(r"rank-(\d+)\.jsonl")
_ECHO = "CommError"  # what ranks say whose peer is gone: the peer's own error is the cause
_R = TypeVar("_R", Checkpoint, End, Profile, Schedule)
_SETTING = '"run_log": {"enabled": true, "output_path": "runs", "job_name": "NAME"}'


class RunLogNotFoundError(UsageError, FileNotFoundError):
    """The folder has no run log; the text says where one may be, or which setting writes one."""


@dataclass(frozen=True)
class Attempt:
    """What ranks told from one start to the next."""

    ranks: Mapping[int, Segment]
    """By rank, what it told."""

    @functools.cached_property
    def starts(self) -> Mapping[int, Start]:
        """By rank; a rank whose start could not be read is missing."""
        return {rank: told.start for rank, told in self.ranks.items() if told.start is not None}

    @property
    def begin(self) -> float:
        """When the first record was written."""
        return min(told.begin for told in self.ranks.values())

    @property
    def end(self) -> float:
        """When the last record was written."""
        return max(told.end for told in self.ranks.values())

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
        """The first ranks of which no record was found; a log may tell of more ranks than there is room to list."""
        return tuple(itertools.islice((rank for rank in range(self.world_size) if rank not in self.ranks), _SHOWN))

    @property
    def missing_count(self) -> int:
        """Of how many ranks no record was found."""
        return self.world_size - len(self.ranks)

    @functools.cached_property
    def steps(self) -> Table:
        """The reported steps, of the lowest rank that tells any."""
        return next((told.steps for told in self.ranks.values() if len(told.steps)), Table(STEP))

    @property
    def experts(self) -> Segment | None:
        """The lowest rank that tells of experts."""
        return next((told for told in self.ranks.values() if len(told.experts)), None)

    @functools.cached_property
    def ends(self) -> Mapping[int, End]:
        """The last `end` of each rank that has one."""
        found = {rank: told.of(End) for rank, told in self.ranks.items()}
        return {rank: ends[-1] for rank, ends in found.items() if ends}

    @functools.cached_property
    def first_step(self) -> int | None:
        """The first step that was reported."""
        return int(self.steps.column("step")[0]) if len(self.steps) else None

    @functools.cached_property
    def loaded_step(self) -> int | None:
        """The step of the first checkpoint that was loaded."""
        loads = (each.step for each in self.told_by_one(Checkpoint) if each.action == "load")
        return next((step for step in loads if step is not None), None)

    @property
    def failures(self) -> tuple[tuple[int, str], ...]:
        """Ranks that ended with an error, and its text: what failed first, before what that did to other ranks."""
        failed = [(rank, end.cause, end.time) for rank, end in self.ends.items() if end.cause not in (None, "done")]
        failed.sort(key=lambda each: (str(each[1]).startswith(_ECHO), each[2]))
        return tuple((rank, str(cause)) for rank, cause, _ in failed)

    @property
    def endless_ranks(self) -> tuple[int, ...]:
        """Ranks that wrote records but no end."""
        ends = self.ends
        return tuple(rank for rank in self.ranks if rank not in ends)

    def told_by_one(self, kind: type[_R]) -> tuple[_R, ...]:
        """All records of a kind by the lowest rank that has any."""
        return next((found for told in self.ranks.values() if (found := told.of(kind))), ())


@dataclass(frozen=True)
class Run:
    """All that a folder tells of one run."""

    folder: Path
    attempts: tuple[Attempt, ...]
    """Of this run."""
    unread: tuple[Unread, ...] = ()
    """The first 200 of each file."""
    unread_count: int = 0
    """How many lines could not be read."""
    cut_off: tuple[str, ...] = ()
    """Files whose last line has no end: their rank was killed while it wrote, or writes now."""
    unknown_kinds: Mapping[str, int] = field(default_factory=dict)
    runs: tuple[tuple[Attempt, ...], ...] = ()
    """The attempts of every run of the folder, this one's too; the newest last."""
    number: int = 1
    """Which of them this one is, from 1."""
    engines: tuple[str, ...] = ()
    """Folders in this one with the logs of engines that trained beside this one in the same processes."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name or str(self.folder)

    def told_by_one(self, kind: type[_R]) -> tuple[_R, ...]:
        """All records of a kind, each attempt's by its lowest rank that has any, in the order of attempts."""
        return tuple(record for attempt in self.attempts for record in attempt.told_by_one(kind))


def read_run(run_dir: Path | str, number: int | None = None) -> Run:
    """Read a folder once.

    Args:
        run_dir: the folder that the files of ranks lie in.
        number: which of its runs, from 1; None: the newest.

    Raises:
        RunLogNotFoundError: there is no record in it, or no such run.
    """
    reader = RunReader(run_dir)
    reader.read_more()
    return reader.run(number)


class RunReader:
    """Reads what is new in a folder, again and again.

    Args:
        run_dir: the folder that the files of ranks lie in.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self.folder = Path(run_dir)
        self._files: dict[Path, RankFile] = {}
        self._closed: list[Unread] = []

    def read_more(self) -> bool:
        """Read complete lines that were appended since the last call; returns whether there were any.

        A file that cannot be opened is named among the lines that were not read.
        """
        is_new = False
        self._closed.clear()
        for path in _files_of(self.folder):
            file = self._files.get(path)
            try:
                if file is None or file.began_anew():
                    file = RankFile(_rank_of(path), path)
                is_new |= file.read_more()
            except OSError as error:
                self._closed.append(Unread(path.name, 0, error.strerror or str(error)))
            else:
                self._files[path] = file
        return is_new

    def run(self, number: int | None = None) -> Run:
        """What has been read so far.

        Args:
            number: which of the folder's runs, from 1; None: the newest.

        Raises:
            RunLogNotFoundError: nothing has, or there is no such run.
        """
        if not self._files and not self._closed:
            raise RunLogNotFoundError(_nothing_in(self.folder))
        files = sorted(self._files.values(), key=lambda file: file.rank)
        segments = [segment for file in files for segment in file.segments]
        unread = (*self._closed, *(each for file in files for each in file.unread))
        if not segments:
            bad = f" ({some([str(each) for each in unread], 2)})" if unread else ""
            raise RunLogNotFoundError(
                f"{self.folder}: {len(files) + len(self._closed)} file(s) of ranks without a record that can be read{bad}. "
                "A run writes its first one when its engine is built, and steps every run_log.every steps: wait for it."
            )
        unknown: Counter[str] = Counter()
        for file in files:
            unknown.update(file.unknown_kinds)
        cut_off = tuple(file.path.name for file in files if file.is_cut_off)
        count = len(self._closed) + sum(file.unread_count for file in files)
        runs = _runs(_attempts(segments))
        chosen = _checked(number, len(runs), self.folder)
        engines = _engines_in(self.folder)
        return Run(self.folder, runs[chosen - 1], unread, count, cut_off, dict(unknown), runs, chosen, engines)


def _files_of(folder: Path) -> list[Path]:
    """The files of ranks in a folder, in the order of ranks; none where there is no such folder."""
    paths = [path for path in folder.glob("rank-*.jsonl") if _FILE.fullmatch(path.name)]
    return sorted(paths, key=_rank_of)


def _rank_of(path: Path) -> int:
    found = _FILE.fullmatch(path.name)
    assert found is not None  # `_files_of` took no other
    return int(found[1])


def _engines_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted({path.parent.name for path in folder.glob("engine-*/rank-*.jsonl")}))


def _checked(number: int | None, count: int, folder: Path) -> int:
    """The number of a run that there is; the newest's for None."""
    if number is not None and not 1 <= number <= count:
        raise RunLogNotFoundError(
            f"{folder}: run {number} was asked for, and there are {count}. Give a number from 1 to {count}."
        )
    return count if number is None else number


def _nothing_in(folder: Path) -> str:
    """The error's text where a folder has no file of a rank."""
    cure = f"Give the folder that a run with {_SETTING} wrote: output_path/job_name."
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError):
        return f"{folder}: no such folder. {cure}"
    except OSError as error:
        return f"{folder}: cannot be listed ({error.strerror}). Read it as a user who may, or give another folder."
    below = sorted(
        {path.parent for path in folder.glob("*/rank-*.jsonl")}, key=lambda path: path.stat().st_mtime, reverse=True
    )
    if below:
        return f"{folder}: no rank-*.jsonl here, but in {some([str(path) for path in below], 5)}: give one of these."
    return f"{folder}: no rank-*.jsonl in it. {cure}"


def _runs(attempts: Iterable[Attempt]) -> tuple[tuple[Attempt, ...], ...]:
    runs: list[tuple[Attempt, ...]] = []
    for attempt in attempts:
        if not runs or _begins_anew(attempt, runs[-1]):
            runs.append(())
        runs[-1] += (attempt,)
    return tuple(runs)


def _begins_anew(attempt: Attempt, before: Iterable[Attempt]) -> bool:
    """Whether nothing of the run before is in this attempt: neither a checkpoint nor its launcher, nor any of its steps."""
    start, begins = attempt.first, [step for each in before if (step := each.first_step) is not None]
    if start is None or start.restarts or start.step or attempt.loaded_step or attempt.first_step is None:
        return False
    return bool(begins) and attempt.first_step <= min(begins)


def _attempts(segments: Iterable[Segment]) -> list[Attempt]:
    by_rank: dict[int, list[Segment]] = {}
    for segment in segments:
        by_rank.setdefault(segment.rank, []).append(segment)
    together = _together(by_rank)
    if together is not None:
        return [_attempt(group) for group in together]
    groups: list[dict[int, Segment]] = []
    told: set[tuple[int | None, int | None]] = set()
    for _, _, segment in sorted(_in_time(by_rank), key=lambda each: each[:2]):
        if not groups or segment.rank in groups[-1] or len(told | _told([segment])) > 1:
            groups.append({})
            told = set()
        groups[-1][segment.rank] = segment
        told |= _told([segment])
    return [_attempt(group) for group in groups]


def _together(by_rank: Mapping[int, Sequence[Segment]]) -> list[dict[int, Segment]] | None:
    """The first starts of all ranks, the second ones, and so on; None where their numbers or what they tell differ."""
    if len({len(mine) for mine in by_rank.values()}) != 1:
        return None
    groups = [
        {segment.rank: segment for segment in group}
        for group in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
    ]
    return None if any(len(_told(group.values())) > 1 for group in groups) else groups


def _in_time(by_rank: Mapping[int, Sequence[Segment]]) -> Iterable[tuple[float, int, Segment]]:
    """When each start was, and by whom; none before the end of the same rank's last one."""
    for rank, mine in by_rank.items():
        earliest = mine[0].begin
        for segment in mine:
            earliest = max(earliest, segment.begin)
            yield earliest, rank, segment
            earliest = max(earliest, segment.end)


def _told(group: Iterable[Segment]) -> set[tuple[int | None, int | None]]:
    """What starts tell of their attempt: two things of it are two attempts."""
    return {(each.start.restarts, each.start.world_size) for each in group if each.start is not None}


def _attempt(group: Mapping[int, Segment]) -> Attempt:
    return Attempt(dict(sorted(group.items())))
