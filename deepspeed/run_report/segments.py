"""What one rank told from a start to its next: steps as columns, the rest as records.

    Step, RankStep, Experts  -->  a row of a `Table`              very many
    Checkpoint, End, ...     -->  the record itself               few

So a run of any length is kept in what its numbers take. Called by `files`. Does not live here: what is made of it (`facts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from deepspeed.run_log import KINDS, Checkpoint, CommSums, End, Experts, Profile, RankStep, Record, Schedule, Start, Step
from deepspeed.run_report.columns import Table, bounded

__all__ = ["EXPERTS", "RANK_STEP", "STEP", "CommTotal", "Segment", "loads"]

STEP = (
    "step", "time", "loss", "grad_norm", "loss_scale", "skipped", "seconds", "samples_per_second", "flops_per_second", "mfu",
)  # fmt: skip
"""Columns of reported steps; groups: `lr` by parameter group, `more` by name."""
RANK_STEP = ("step", "time", "host_bytes", "device_bytes", "device_peak_bytes", "waited_seconds")
"""Columns of a rank's own view of steps; group: `phases` by name."""
EXPERTS = ("step", "fullest", "mean")
"""Columns of expert loads: the fullest expert of all layers, and the mean over layers of each layer's fullest."""
_WHOLE_EXPERTS = 16  # records of experts that are kept whole: a page shows the last
_MOST_GROUPS = 8  # of parameters, whose learning rates are drawn
_MOST_OPERATIONS = 256

_Kept = TypeVar("_Kept", Checkpoint, End, Profile, Schedule)


@dataclass
class CommTotal:
    """One collective operation of one rank: what its records add up to."""

    count: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0

    def add(self, told: CommSums | CommTotal) -> None:
        """Count what was told; sums stay so far below the largest number that sums of them are finite, too."""
        self.count = bounded(self.count + told.count)
        self.nbytes = bounded(self.nbytes + told.nbytes)
        self.seconds = bounded(self.seconds + told.seconds)


@dataclass
class Segment:
    """The records of one rank from a start to the next, at least one; without a start where that line could not be read."""

    rank: int
    begin: float
    """When its first record was written."""
    start: Start | None = None
    end: float = 0.0
    """When its last one was."""
    count: int = 0
    """Records."""
    steps: Table = field(default_factory=lambda: Table(STEP))
    rank_steps: Table = field(default_factory=lambda: Table(RANK_STEP))
    experts: Table = field(default_factory=lambda: Table(EXPERTS))
    whole_experts: deque[Experts] = field(default_factory=lambda: deque(maxlen=_WHOLE_EXPERTS))
    """The last records of experts."""
    comm: dict[str, CommTotal] = field(default_factory=dict)
    """By operation."""
    _others: dict[type[Record], list[Record]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Take the next record."""
        self.end = record.time
        self.count += 1
        if isinstance(record, RankStep):
            self._add_rank_step(record)
        elif isinstance(record, Step):
            rates = {str(at): rate for at, rate in enumerate((record.lr or ())[:_MOST_GROUPS])}
            self.steps.append([getattr(record, name) for name in STEP], lr=rates, more=record.more)
        elif isinstance(record, Experts):
            fullest = [max(load) for load in loads(record).values()]
            self.experts.append((record.step, max(fullest, default=None), sum(fullest) / len(fullest) if fullest else None))
            self.whole_experts.append(record)
        elif not isinstance(record, Start):
            self._others.setdefault(KINDS[record.kind], []).append(record)

    def _add_rank_step(self, record: RankStep) -> None:
        self.rank_steps.append([getattr(record, name) for name in RANK_STEP], phases=record.phases)
        for name, told in (record.comm or {}).items():
            if told is not None and (name in self.comm or len(self.comm) < _MOST_OPERATIONS):
                total = self.comm.setdefault(name, CommTotal())
                total.add(told)

    def of(self, kind: type[_Kept]) -> tuple[_Kept, ...]:
        """The records of a kind that are kept as they are."""
        return tuple(self._others.get(kind, ()))  # type: ignore[arg-type]


def loads(record: Experts) -> Mapping[str, list[float]]:
    """By layer, each expert's tokens in times the even share; layers without experts are left out."""
    return {
        name: [len(shares) * (share or 0.0) for share in shares] for name, shares in record.layers.items() if len(shares)
    }
