"""What a benchmark is made of, and the arithmetic of comparing contenders pair by pair. No torch, no processes.

pair 0    ours   ddp   original        one fresh set of processes each
pair 1    original   ddp   ours        the order turns round, so that a slow drift of the machine cancels
pair 2    ours   ddp   original
  ratio of a pair = ours / ddp, both of the same pair; what is shown is the median of the ratios and their range
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "ours"
AGAIN = "ours again"
"""The same as `OURS`, run a second time in every pair (`--noise`): its ratio shows what the machine alone does."""
ORIGINAL = "original"
"""The original package, in its own interpreter."""

Figures = Mapping[str, Mapping[str, float]]
"""contender -> figure -> value, all of one pair."""


@dataclass(frozen=True)
class Goal:
    """`figure` of `contender`, over that of `of`, is at most `at_most`; `over` is first subtracted from both."""

    figure: str
    at_most: float
    of: str | None = None
    over: str | None = None
    contender: str = OURS

    @property
    def needs(self) -> frozenset[str]:
        """The contenders that a pair must hold."""
        return frozenset(name for name in (self.contender, self.of, self.over) if name is not None)

    def value(self, pair: Figures) -> float | None:
        """What the goal speaks of in one pair; None when a contender is missing or the divisor is not positive."""
        if any(self.figure not in pair.get(name, {}) for name in self.needs):
            return None
        floor = pair[self.over][self.figure] if self.over is not None else 0.0
        unit = pair[self.of][self.figure] - floor if self.of is not None else 1.0
        return (pair[self.contender][self.figure] - floor) / unit if unit > 0 else None

    def __str__(self) -> str:
        def less(name: str) -> str:
            return f"({name} - {self.over})" if self.over is not None else name

        return f"{self.figure}: {less(self.contender)}{f' / {less(self.of)}' if self.of is not None else ''}"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        title: names it in tables and for `--only`; begins with the benchmark's name.
        benchmark: module of this package whose `measure(contender, arguments)` runs in every rank.
        contenders: who is compared, in the order of the first pair.
        figures: what is shown, lower is better in each; ratios are taken of the first.
        of: the contender that ratios are taken to.
        goals: what is aimed at.
        pairs: how often, unless the command line says otherwise.
        side_pairs: the same for contenders that neither a goal nor `of` speaks of.
        multiplies_bf16: whether it is ruled by matrix products in bf16, and says nothing where those are emulated.
        loss_tolerance: relative difference of losses beyond which the comparison is void; None: it has no losses.
        loss_exempt: (contender, loss) that are shown but not compared.
        arguments: handed to `measure`.
        warm_up: a run of the original before the first pair, which compiles what it needs for this case and few others.
    """

    title: str
    benchmark: str
    contenders: tuple[str, ...]
    figures: tuple[str, ...]
    of: str
    ranks: int = 1
    goals: tuple[Goal, ...] = ()
    pairs: int = 5
    side_pairs: int = 2
    multiplies_bf16: bool = False
    loss_tolerance: float | None = None
    loss_exempt: frozenset[tuple[str, str]] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    warm_up: Case | None = None

    def contenders_in(self, pair: int, pairs: int | None = None) -> Iterator[str]:
        """Who runs in `pair`, in order. `pairs` given: everybody runs that often."""
        central = {OURS, AGAIN, self.of}.union(*(goal.needs for goal in self.goals))
        for name in self.contenders if pair % 2 == 0 else reversed(self.contenders):
            default = self.pairs if name in central else self.side_pairs
            if pair < (default if pairs is None else pairs):
                yield name


@dataclass(frozen=True)
class Measured:
    """What one rank measured: lower is better in every figure; losses say whether contenders did the same work."""

    figures: dict[str, float]
    losses: dict[str, float] = field(default_factory=dict)


def merge(ranks: Sequence[Measured]) -> Measured:
    """Return the worst rank's figures and the mean of the losses over ranks."""
    return Measured(
        {key: max(rank.figures[key] for rank in ranks) for key in ranks[0].figures},
        {key: statistics.fmean(rank.losses[key] for rank in ranks) for key in ranks[0].losses},
    )


@dataclass(frozen=True)
class Run:
    """One contender in one pair of one case. `error` is the one line that says why there are no figures."""

    case: str
    contender: str
    pair: int
    wall_seconds: float
    measured: Measured | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


def runs_of(case: Case, runs: Sequence[Run]) -> list[Run]:
    """Those of `runs` that belong to `case`."""
    return [run for run in runs if run.case == case.title]


@dataclass(frozen=True)
class Spread:
    """Median and range of some values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.median:.4g}"
        return f"{self.median:.4g} ({self.low:.4g}-{self.high:.4g})"


def figures_by_pair(runs: Sequence[Run]) -> dict[int, dict[str, dict[str, float]]]:
    """Return pair -> contender -> figures, of the runs of one case that succeeded."""
    pairs: dict[int, dict[str, dict[str, float]]] = {}
    for run in runs:
        if run.measured is not None:
            pairs.setdefault(run.pair, {})[run.contender] = run.measured.figures
    return pairs


def goal_spread(goal: Goal, runs: Sequence[Run]) -> Spread | None:
    """What `goal` speaks of over all pairs that have it; None when there is no such pair."""
    values = [value for pair in figures_by_pair(runs).values() if (value := goal.value(pair)) is not None]
    return Spread.of(values) if values else None


@dataclass(frozen=True)
class LossCheck:
    """How many losses were held against ours of the same pair, and those that differ by more than the case allows."""

    compared: int
    faults: tuple[str, ...]


def check_losses(case: Case, runs: Sequence[Run]) -> LossCheck:
    """Hold every contender's losses against ours; nothing is compared when the case has no tolerance."""
    ours = {run.pair: run.measured.losses for run in runs if run.contender == OURS and run.measured is not None}
    compared, faults = 0, []
    for run in runs:
        if case.loss_tolerance is None or run.measured is None or run.contender == OURS:
            continue
        for key in run.measured.losses.keys() & ours.get(run.pair, {}).keys():
            if (run.contender, key) in case.loss_exempt:
                continue
            loss, reference = run.measured.losses[key], ours[run.pair][key]
            compared += 1
            if not abs(loss - reference) <= case.loss_tolerance * abs(reference):  # so written that NaN is a fault
                faults.append(f"pair {run.pair}, {key} loss: {run.contender} {loss:.6g}, ours {reference:.6g}")
    return LossCheck(compared, tuple(faults))
