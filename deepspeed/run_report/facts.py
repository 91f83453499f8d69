"""What happened in a run, in numbers: curves, phases, traffic, waits, what stands out. Pure: no files, no pixels.

    attempt 1   1 2 3 4 5 6         kept:    1 2 3 4 | 5 6 7 8
    attempt 2           5 6 7 8     redone:  5 6 of attempt 1, which the restart from step 4 gave up

Seconds and bytes throughout. Called by `sections` and `top`. Does not live here: how a number is written (`texts`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from deepspeed.run_log import Checkpoint, Experts
from deepspeed.run_report.columns import Numbers, Places, Rows, Table
from deepspeed.run_report.reading import Attempt, Run
from deepspeed.run_report.segments import RANK_STEP, CommTotal

__all__ = [
    "Curve",
    "ExpertLoads",
    "Memory",
    "Operation",
    "Phases",
    "Steps",
    "Waits",
    "checkpoints",
    "curve",
    "curve_of",
    "elapsed",
    "experts",
    "memory",
    "operations",
    "phases",
    "plan_terms",
    "rank_steps",
    "steps",
    "waits",
]

_STANDS_OUT = 0.02  # of the time; less is what any two ranks differ by
_TELLING = 0.5  # of a process's memory before its engine was built: libraries grow by parts of it when they are first used


@dataclass(frozen=True, eq=False)
class Curve:
    """Values over steps; nan where a value is not known or not finite."""

    name: str
    steps: Numbers
    values: Numbers

    @property
    def known(self) -> Numbers:
        """The values that are known."""
        return self.values[~np.isnan(self.values)]

    @property
    def last(self) -> float | None:
        """The last known value."""
        known = self.known
        return float(known[-1]) if len(known) else None

    def at(self, step: float) -> float | None:
        """The value of a step, the last of several."""
        found = self.values[self.steps == step]
        return float(found[-1]) if len(found) and not np.isnan(found[-1]) else None


def curve_of(name: str, steps: Sequence[float], values: Sequence[float | None]) -> Curve:
    """A curve of plain values; None where one is not known."""
    return Curve(name, np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64))


def curve(name: str, rows: Rows, column: str, group: str | None = None) -> Curve:
    """One column over steps."""
    return Curve(name, rows.values("step"), rows.values(column, group))


@dataclass(frozen=True)
class Steps:
    """The reported steps of a run, over its attempts."""

    kept: Rows
    redone: Rows
    """Steps that a later attempt gave up, most of them to compute them again."""


def steps(run: Run) -> Steps:
    """The steps that the final weights saw, and those that restarts gave up."""
    return _joined([(attempt, attempt.steps) for attempt in run.attempts])


def rank_steps(run: Run) -> dict[int, Rows]:
    """Each rank's records of the steps that were kept, where it has any."""
    found = {rank: _joined(_of_rank(run, rank)).kept for rank in _ranks(run)}
    return {rank: rows for rank, rows in found.items() if len(rows)}


def _ranks(run: Run) -> list[int]:
    return sorted({rank for attempt in run.attempts for rank in attempt.ranks})


def _of_rank(run: Run, rank: int) -> list[tuple[Attempt, Table]]:
    """A rank's own view of steps by attempt; no rows where it was not in one."""
    nothing = Table(RANK_STEP)
    return [(each, each.ranks[rank].rank_steps if rank in each.ranks else nothing) for each in run.attempts]


Place = Literal["device", "host"]


def plan_terms(run: Run, place: Place) -> Mapping[str, float]:
    """Bytes by term that the fullest rank was planned to hold in a place, by the last attempt that has a plan.

    A host that is the device of its rank holds what is planned for devices and hosts; files hold the rest.
    """
    elsewhere = (" (nvme)",) if place == "host" else (" (host)", " (nvme)")
    for attempt in reversed(run.attempts):
        plans = [
            {name: nbytes or 0.0 for name, nbytes in start.plan.items() if not name.endswith(elsewhere)}
            for start in attempt.starts.values()
            if start.plan
        ]
        if plans:
            return max(plans, key=lambda plan: sum(plan.values()))
    return {}


@dataclass(frozen=True)
class Memory:
    """What ranks held over steps."""

    place: Place
    """`device` where a rank knows its device's memory, else `host`."""
    by_rank: Mapping[int, Curve]
    peaks: Mapping[int, float]
    """The most that each rank held: as the device says, or the largest value seen."""
    plan: float | None
    """What the fullest rank was planned to hold."""
    before: float | None = None
    """On a host: the most that a process held before its engine was built, which is left out above; None: nothing is."""

    @property
    def fullest(self) -> int | None:
        """The rank with the highest peak."""
        return max(self.peaks, key=lambda rank: (self.peaks[rank], -rank)) if self.peaks else None

    @property
    def comparable_plan(self) -> float | None:
        """The plan, where memory says something about it.

        A process holds Python and libraries as well. They are left out where the log tells their size, but they grow while
        they work: beside them a small plan is lost.
        """
        if self.place == "device":
            return self.plan
        return self.plan if self.plan and self.before is not None and self.plan >= _TELLING * self.before else None


def memory(run: Run) -> Memory:
    """Bytes over steps by rank, and the plan."""
    told = [each for attempt in run.attempts for each in attempt.ranks.values() if len(each.rank_steps)]
    is_device = any(not np.isnan(each.rank_steps.column("device_bytes")).all() for each in told)
    known = [] if is_device else [None if each.start is None else each.start.host_bytes for each in told]
    before = max((each for each in known if each is not None), default=None) if None not in known else None
    curves, peaks = {}, {}
    for rank in _ranks(run):
        rows = _joined(_of_rank(run, rank)).kept
        held = rows.values("device_bytes") if is_device else _beyond(run, rank, rows, before)
        highest = np.concatenate([held, rows.values("device_peak_bytes")]) if is_device else held
        if not np.isnan(highest).all():
            curves[rank], peaks[rank] = Curve(f"rank {rank}", rows.values("step"), held), float(np.nanmax(highest))
    place: Place = "device" if is_device else "host"
    return Memory(place, curves, peaks, sum(plan_terms(run, place).values()) or None, before)


def _beyond(run: Run, rank: int, rows: Rows, before: float | None) -> Numbers:
    """What a process held beyond what it held before the engine of its attempt was built; all of it if that is not known."""
    if before is None:
        return rows.values("host_bytes")
    starts = {id(each.ranks[rank].rank_steps): each.starts[rank].host_bytes for each in run.attempts if rank in each.starts}
    held = [table.column("host_bytes")[places] - (starts.get(id(table)) or 0.0) for table, places in rows.parts]
    return np.maximum(0.0, np.concatenate(held or [np.empty(0)]))


@dataclass(frozen=True)
class Phases:
    """Seconds of a step by phase; no phase is part of another."""

    steps: Numbers = field(default_factory=lambda: np.empty(0))
    seconds: Mapping[str, Numbers] = field(default_factory=dict)
    """By phase, the mean over ranks for each step, largest phase first."""
    by_rank: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By phase, each rank's mean over steps."""

    def mean(self, phase: str) -> float:
        """Mean over steps and ranks."""
        return _mean(self.seconds[phase])


def phases(run: Run) -> Phases:
    """How ranks spent their steps."""
    told = rank_steps(run)
    names = dict.fromkeys(name for rows in told.values() for name in rows.names("phases"))
    values = {name: {rank: rows.values(name, "phases") for rank, rows in told.items()} for name in names}
    by_rank = {
        name: {rank: _mean(known) for rank, each in mine.items() if len(known := each[~np.isnan(each)])}
        for name, mine in values.items()
    }
    steps = {rank: rows.values("step") for rank, rows in told.items()}
    has_any = {rank: np.any([~np.isnan(mine[rank]) for mine in values.values()], axis=0) for rank in told if names}
    at = np.unique(np.concatenate([steps[rank][has_any[rank]] for rank in has_any] or [np.empty(0)]))
    means = {name: _mean_by_step(at, steps, mine) for name, mine in values.items() if by_rank[name]}
    largest_first = sorted(means, key=lambda name: -float(np.sum(means[name])))
    return Phases(at, {name: means[name] for name in largest_first}, {name: by_rank[name] for name in largest_first})


def _mean_by_step(at: Numbers, steps: Mapping[int, Numbers], values: Mapping[int, Numbers]) -> Numbers:
    """The mean over ranks at each of the steps `at`; 0 where no rank knows."""
    sums, counts = np.zeros(len(at)), np.zeros(len(at))
    for rank, mine in values.items():
        known = ~np.isnan(mine)
        places = np.searchsorted(at, steps[rank][known])
        sums += np.bincount(places, mine[known], len(at))
        counts += np.bincount(places, minlength=len(at))
    return sums / np.maximum(1.0, counts)


@dataclass(frozen=True)
class Operation:
    """One collective operation: the mean over ranks of what they did in all the run."""

    name: str
    count: float
    nbytes: float
    seconds: float

    @property
    def bytes_per_second(self) -> float | None:
        """Throughput of a rank; None where it took no time that was measured."""
        return self.nbytes / self.seconds if self.seconds > 0 else None


def operations(run: Run) -> list[Operation]:
    """Collective operations, the longest first; steps that were redone count, too."""
    sums: dict[str, CommTotal] = {}
    ranks = set()
    for attempt in run.attempts:
        for rank, told in attempt.ranks.items():
            for name, total in told.comm.items():
                sums.setdefault(name, CommTotal()).add(total)
                ranks.add(rank)
    found = [
        Operation(name, *(each / len(ranks) for each in (told.count, told.nbytes, told.seconds)))
        for name, told in sums.items()
    ]
    return sorted(found, key=lambda each: (-each.seconds, -each.nbytes, each.name))


@dataclass(frozen=True)
class Waits:
    """How long ranks stood in collectives. Who waits least is who the others wait for."""

    seconds: Mapping[int, float]
    """By rank, in all the run."""
    covered_seconds: float
    """The time in which they were counted."""
    by_step: Mapping[int, Curve]
    """By rank, since its record before."""
    straggler: int | None
    """The rank that others wait for; None: none stands out."""
    lost_seconds: float
    """How much longer than the straggler the median of the other ranks waited."""


def waits(run: Run) -> Waits:
    """Who waits for whom."""
    curves = {rank: curve(f"rank {rank}", rows, "waited_seconds") for rank, rows in rank_steps(run).items()}
    curves = {rank: _without_unknown(mine) for rank, mine in curves.items() if len(mine.known)}
    totals = {rank: _waited(run, rank) for rank in curves}
    covered = sum(_covered(attempt) for attempt in run.attempts)
    straggler, lost = _straggler(totals, covered)
    return Waits(totals, covered, curves, straggler, lost)


def _without_unknown(told: Curve) -> Curve:
    return Curve(told.name, told.steps[~np.isnan(told.values)], told.known)


def _waited(run: Run, rank: int) -> float:
    """In all attempts, steps that were redone included."""
    return sum(float(np.nansum(table.column("waited_seconds"))) for _, table in _of_rank(run, rank))


def _straggler(totals: Mapping[int, float], covered: float) -> tuple[int | None, float]:
    if len(totals) < 2:
        return None, 0.0
    least = min(totals, key=lambda rank: (totals[rank], rank))
    lost = statistics.median(seconds for rank, seconds in totals.items() if rank != least) - totals[least]
    return (least if lost > _STANDS_OUT * covered else None), lost


def _covered(attempt: Attempt) -> float:
    """From a rank's start to its last record of a step, by its own clock, whose steps back do not count; the longest."""
    times = [
        np.concatenate([[told.begin], told.rank_steps.column("time")])
        for told in attempt.ranks.values()
        if len(told.rank_steps)
    ]
    return max((elapsed(mine) for mine in times), default=0.0)


def elapsed(times: Numbers) -> float:
    """Seconds from the first time to the last; where a clock was set back, without that step."""
    return float(np.maximum(0.0, np.diff(times)).sum())


@dataclass(frozen=True)
class ExpertLoads:
    """How full experts were at the steps that were kept."""

    rows: Rows
    latest: Experts | None
    """The last record."""


def experts(run: Run) -> ExpertLoads:
    """Tokens per expert."""
    told = [(attempt, mine) for attempt in run.attempts if (mine := attempt.experts) is not None]
    rows = _joined([(attempt, mine.experts) for attempt, mine in told]).kept
    if not rows.parts:
        return ExpertLoads(rows, None)
    table, last = rows.parts[-1][0], rows.values("step")[-1]
    (whole,) = [mine.whole_experts for _, mine in told if mine.experts is table]
    same = [each for each in whole if each.step == last]
    return ExpertLoads(rows, same[-1] if same else min(whole, key=lambda each: abs(each.step - last)))


def checkpoints(run: Run) -> tuple[Checkpoint, ...]:
    """Checkpoints saved and loaded, as the first rank tells them."""
    return run.told_by_one(Checkpoint)


def _joined(told: Sequence[tuple[Attempt, Table]]) -> Steps:
    """Rows over attempts, without those that a later attempt's steps replace; and these."""
    kept: list[tuple[Table, Places]] = []
    redone: list[tuple[Table, Places]] = []
    before = np.inf  # the first step that any later attempt computed
    for attempt, table in reversed(told):
        steps = table.column("step")
        is_kept = steps < before
        kept.append((table, _latest(steps, np.flatnonzero(is_kept))))
        redone.append((table, np.flatnonzero(~is_kept)))
        begin = _first_step(attempt, steps)
        before = before if begin is None else min(before, begin)
    return Steps(*(Rows(tuple(part for part in reversed(parts) if len(part[1]))) for parts in (kept, redone)))


def _latest(steps: Numbers, places: Places) -> Places:
    """Of places those in the order of steps; of a step that was told twice the later one."""
    mine = steps[places]
    if np.all(np.diff(mine) > 0):
        return places
    order = np.argsort(mine, kind="stable")
    is_last = np.append(np.diff(mine[order]) > 0, True)
    return np.asarray(places[order[is_last]])


def _first_step(attempt: Attempt, steps: Numbers) -> float | None:
    """The first step that an attempt computed, so far as it is known: a start is told before a checkpoint is loaded."""
    firsts = [float(each) for each in (*steps[:1], *attempt.steps.column("step")[:1])]
    if firsts:
        loaded = attempt.loaded_step
        firsts += [loaded + 1.0] if loaded is not None and loaded < min(firsts) else []
    return min(firsts) if firsts else None


def _mean(values: Numbers) -> float:
    return float(np.sum(values / len(values)))
