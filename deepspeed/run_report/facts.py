"""What happened in a run, in numbers: curves, phases, traffic, waits, what stands out. Pure: no files, no pixels.

    attempt 1   1 2 3 4 5 6         kept:    1 2 3 4 | 5 6 7 8
    attempt 2           5 6 7 8     redone:  5 6 of attempt 1, which the restart from step 4 gave up

Seconds and bytes throughout. Called by `sections` and `top`. Does not live here: how a number is written (`texts`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from deepspeed.run_log import Checkpoint, Experts, RankStep, Step
from deepspeed.run_report.reading import Attempt, Run

__all__ = [
    "Curve",
    "Memory",
    "Operation",
    "Phases",
    "Steps",
    "Waits",
    "checkpoints",
    "curve",
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


class _Held(NamedTuple):
    """What a rank held at a step."""

    step: int
    nbytes: float | None
    peak_nbytes: float | None


_Stepped = TypeVar("_Stepped", Step, RankStep, Experts, _Held)


@dataclass(frozen=True)
class Curve:
    """Values over steps; None where a value is not known or not finite."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def known(self) -> tuple[float, ...]:
        """The values that are known."""
        return tuple(value for value in self.values if value is not None)

    @property
    def last(self) -> float | None:
        """The last known value."""
        return self.known[-1] if self.known else None


@dataclass(frozen=True)
class Steps:
    """The reported steps of a run, over its attempts."""

    kept: tuple[Step, ...]
    redone: tuple[Step, ...]
    """Steps that a later attempt gave up, most of them to compute them again."""


def steps(run: Run) -> Steps:
    """The steps that the final weights saw, and those that restarts gave up."""
    kept, redone = _joined([(attempt, attempt.steps) for attempt in run.attempts])
    return Steps(tuple(kept), tuple(redone))


def rank_steps(run: Run) -> dict[int, tuple[RankStep, ...]]:
    """Each rank's records of the steps that were kept."""
    ranks = sorted({rank for attempt in run.attempts for rank in attempt.ranks})
    told = [(attempt, attempt.rank_steps) for attempt in run.attempts]
    found = {rank: tuple(_joined([(attempt, by_rank.get(rank, ())) for attempt, by_rank in told])[0]) for rank in ranks}
    return {rank: records for rank, records in found.items() if records}


def curve(name: str, records: Sequence[_Stepped], value: Callable[[_Stepped], float | None]) -> Curve:
    """One value of each record."""
    return Curve(name, tuple(record.step for record in records), tuple(value(record) for record in records))


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
    by_attempt = [(attempt, attempt.rank_steps) for attempt in run.attempts]
    told = [record for _, by_rank in by_attempt for records in by_rank.values() for record in records]
    place: Place = "device" if any(record.device_bytes is not None for record in told) else "host"
    known = [] if place == "device" else [_before(attempt, rank) for attempt, ranks in by_attempt for rank in ranks]
    before = max((each for each in known if each is not None), default=None) if None not in known else None
    curves, peaks = {}, {}
    for rank in sorted({rank for _, by_rank in by_attempt for rank in by_rank}):
        mine = [
            (attempt, [_held(each, place, None if before is None else _before(attempt, rank)) for each in by_rank[rank]])
            for attempt, by_rank in by_attempt
            if rank in by_rank
        ]
        held = _joined(mine)[0]
        highest = [nbytes for each in held for nbytes in (each.nbytes, each.peak_nbytes) if nbytes is not None]
        if highest:
            curves[rank], peaks[rank] = curve(f"rank {rank}", held, lambda each: each.nbytes), max(highest)
    plan = sum(plan_terms(run, place).values()) or None
    return Memory(place, curves, peaks, plan, before)


def _before(attempt: Attempt, rank: int) -> float | None:
    return attempt.starts[rank].host_bytes if rank in attempt.starts else None


def _held(record: RankStep, place: Place, before: float | None) -> _Held:
    if place == "device":
        return _Held(record.step, record.device_bytes, record.device_peak_bytes or None)
    nbytes = record.host_bytes
    return _Held(record.step, None if nbytes is None else max(0.0, nbytes - (before or 0.0)), None)


@dataclass(frozen=True)
class Phases:
    """Seconds of a step by phase; no phase is part of another."""

    steps: tuple[int, ...]
    seconds: Mapping[str, tuple[float, ...]]
    """By phase, the mean over ranks for each step, largest phase first."""
    by_rank: Mapping[str, Mapping[int, float]]
    """By phase, each rank's mean over steps."""

    def mean(self, phase: str) -> float:
        """Mean over steps and ranks."""
        return statistics.fmean(self.seconds[phase])


def phases(run: Run) -> Phases:
    """How ranks spent their steps."""
    by_step: dict[int, dict[str, list[float]]] = {}
    by_rank: dict[str, dict[int, list[float]]] = {}
    for rank, records in rank_steps(run).items():
        for record in records:
            for phase, seconds in (record.phases or {}).items():
                if seconds is None:
                    continue
                by_step.setdefault(record.step, {}).setdefault(phase, []).append(seconds)
                by_rank.setdefault(phase, {}).setdefault(rank, []).append(seconds)
    at = sorted(by_step)
    means = {phase: tuple(_mean(by_step[step].get(phase, ())) or 0.0 for step in at) for phase in by_rank}
    largest_first = sorted(means, key=lambda phase: -sum(means[phase]))
    of_ranks = {
        phase: {rank: statistics.fmean(values) for rank, values in by_rank[phase].items()} for phase in largest_first
    }
    return Phases(tuple(at), {phase: means[phase] for phase in largest_first}, of_ranks)


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
    sums: dict[str, tuple[float, float, float]] = {}
    ranks = set()
    for attempt in run.attempts:
        for rank, records in attempt.rank_steps.items():
            for record in records:
                for name, total in (record.comm or {}).items():
                    if total is not None:
                        count, nbytes, seconds = sums.get(name, (0.0, 0.0, 0.0))
                        sums[name] = (count + total.count, nbytes + total.nbytes, seconds + total.seconds)
                        ranks.add(rank)
    found = [Operation(name, *(each / len(ranks) for each in told)) for name, told in sums.items()]
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
    by_rank = {
        rank: [each for each in records if each.waited_seconds is not None] for rank, records in rank_steps(run).items()
    }
    by_rank = {rank: records for rank, records in by_rank.items() if records}
    curves = {rank: curve(f"rank {rank}", records, lambda each: each.waited_seconds) for rank, records in by_rank.items()}
    totals = {rank: _waited(run, rank) for rank in curves}
    covered = sum(_covered(attempt) for attempt in run.attempts)
    straggler, lost = _straggler(totals, covered)
    return Waits(totals, covered, curves, straggler, lost)


def _waited(run: Run, rank: int) -> float:
    """In all attempts, steps that were redone included."""
    told = (record for attempt in run.attempts for record in attempt.rank_steps.get(rank, ()))
    return sum(record.waited_seconds or 0.0 for record in told)


def _straggler(totals: Mapping[int, float], covered: float) -> tuple[int | None, float]:
    if len(totals) < 2:
        return None, 0.0
    least = min(totals, key=lambda rank: (totals[rank], rank))
    lost = statistics.median(seconds for rank, seconds in totals.items() if rank != least) - totals[least]
    return (least if lost > _STANDS_OUT * covered else None), lost


def _covered(attempt: Attempt) -> float:
    """From a rank's start to its last record of a step, by its own clock, whose steps back do not count; the longest."""
    times = [
        [attempt.ranks[rank][0].time, *(record.time for record in records)]
        for rank, records in attempt.rank_steps.items()
        if records
    ]
    return max((elapsed(mine) for mine in times), default=0.0)


def elapsed(times: Sequence[float]) -> float:
    """Seconds from the first time to the last; where a clock was set back, without that step."""
    return sum(max(0.0, after - before) for before, after in itertools.pairwise(times))


def experts(run: Run) -> list[Experts]:
    """Shares of tokens per expert, of the steps that were kept."""
    return _joined([(attempt, attempt.told_by_one(Experts)) for attempt in run.attempts])[0]


def checkpoints(run: Run) -> tuple[Checkpoint, ...]:
    """Checkpoints saved and loaded, as the first rank tells them."""
    return run.told_by_one(Checkpoint)


def _joined(told: Sequence[tuple[Attempt, Sequence[_Stepped]]]) -> tuple[list[_Stepped], list[_Stepped]]:
    """Records over attempts, without those that a later attempt's steps replace; and these."""
    kept: list[_Stepped] = []
    redone: list[_Stepped] = []
    for attempt, records in told:
        begin = _first_step(attempt, records)
        if begin is not None:
            redone += [record for record in kept if record.step >= begin]
            kept = [record for record in kept if record.step < begin]
        latest = {record.step: record for record in records}  # a step told twice: the later record
        kept += [latest[step] for step in sorted(latest)]
    return kept, redone


def _first_step(attempt: Attempt, records: Iterable[_Stepped]) -> int | None:
    """The first step that an attempt computed, so far as it is known: a start is told before a checkpoint is loaded."""
    firsts = [record.step for record in records][:1] + [each.step for each in attempt.steps[:1]]
    if firsts:
        loads = [each for each in attempt.told_by_one(Checkpoint) if each.action == "load" and each.step is not None]
        firsts += [each.step + 1 for each in loads[:1] if each.step is not None and each.step < min(firsts)]
    return min(firsts) if firsts else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
