"""The records of a run log, and how one becomes a line.

    Step(step=10, loss=2.5, ...) --line_of--> {"kind": "step", "time": 1760000000.0, "step": 10, "loss": 2.5, ...}

Times are seconds, sizes bytes. None means not known, and so does a number that is not finite: JSON has neither infinity nor
NaN. Readers pass over kinds and keys that they do not know, so either may be added; one that changes its meaning raises
`FORMAT`.

[Note: one description, two ways] Whoever writes a record gives every value, None where it is not known: fields of a line
have no defaults, but for what came later than the first version. Whoever reads one takes whatever the line has, for another
version may have written it: a field that may be None may be absent.

Pure. Does not live here: the file (`writer`), reading (`run_report.lines`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar

from pydantic import JsonValue

__all__ = [
    "FORMAT",
    "KINDS",
    "Checkpoint",
    "CommSums",
    "End",
    "Experts",
    "Profile",
    "ProfileRow",
    "RankStep",
    "Record",
    "Schedule",
    "Start",
    "Step",
    "line_of",
]

FORMAT = 1
"""Raised when an old reader would misread a new log."""


@dataclass(frozen=True)
class Record:
    """One line."""

    kind: ClassVar[str]

    time: float = field(default=0.0, kw_only=True)
    """When it was written, in seconds since 1970: the writer's clock says so."""


@dataclass(frozen=True)
class Start(Record):
    """An engine was made. Every rank; a restart, or a second engine, adds another."""

    kind: ClassVar[str] = "start"

    version: str | None
    rank: int
    world_size: int | None
    host: str | None
    pid: int | None
    device: str | None
    mesh: Mapping[str, int] | None
    """Axis -> ranks along it."""
    model: str | None
    """Class of the module."""
    parameters: int | None
    """Elements of this rank's module, whole: of a pipeline its stage."""
    config: Mapping[str, Any] | None
    """Without secrets."""
    peak_flops: float | None
    """Per second and device."""
    restarts: int | None
    """How often an elastic launcher has started the ranks anew."""
    plan: Mapping[str, float | None] | None
    """Term of the memory plan -> bytes of this rank; a term elsewhere than on the device says so: `masters (host)`."""
    step: int | None
    """Global steps done; a checkpoint that is loaded later says so itself."""
    host_bytes: float | None = None
    """Resident set of the process before the engine was built, without the module's own tensors: Python and libraries."""
    format: int | None = FORMAT


@dataclass(frozen=True)
class Step(Record):
    """One reported step of the whole run. Rank 0."""

    kind: ClassVar[str] = "step"

    step: int
    samples: float | None
    loss: float | None
    """Mean over the step's micro-batches and ranks."""
    lr: Sequence[float | None] | None
    grad_norm: float | None
    loss_scale: float | None
    skipped: int | None
    """Updates skipped so far."""
    seconds: float | None
    """Per step, since the last reported one; None for the first step of a run."""
    samples_per_second: float | None
    flops_per_second: float | None
    """Of all ranks together, recomputation included; None unless the FLOPs profiler has counted a step."""
    mfu: float | None
    """Share of the peak of all devices, recomputation left out."""
    more: Mapping[str, float | None] | None
    """Other values by name, such as auxiliary losses and `eval_loss`."""


@dataclass(frozen=True)
class CommSums:
    """Calls of one collective: their number, the bytes of their messages, and the time from call to end."""

    count: float = 0
    nbytes: float = 0
    seconds: float = 0


@dataclass(frozen=True)
class RankStep(Record):
    """One reported step as one rank saw it. Every rank."""

    kind: ClassVar[str] = "rank_step"

    step: int
    host_bytes: float | None
    """Resident set of the process."""
    device_bytes: float | None
    """Allocated on the device now; None where the device is the host."""
    device_peak_bytes: float | None
    phases: Mapping[str, float | None] | None
    """Phase -> seconds per step since the last record; none is part of another."""
    comm: Mapping[str, CommSums | None] | None
    """Collective -> what was done since the last record."""
    waited_seconds: float | None
    """Blocked in collectives since the last record; the rank with the least is the one that others wait for."""


@dataclass(frozen=True)
class Experts(Record):
    """Where tokens went in the last micro-batch of a reported step. Rank 0."""

    kind: ClassVar[str] = "experts"

    step: int
    layers: Mapping[str, Sequence[float | None]]
    """MoE layer -> share of the tokens of each expert, over all data-parallel ranks."""


@dataclass(frozen=True)
class Schedule(Record):
    """One batch of a pipeline. Rank 0, once after a start."""

    kind: ClassVar[str] = "schedule"

    name: str | None
    stages: int | None
    micro_batches: int | None
    text: str | None
    """A drawing, one line per stage."""
    works: Sequence[tuple[int, float, float, str, int | None]] | None
    """(stage, start, end, kind F, B or W, micro-batch)."""
    bubble: float | None
    """Share of the time of all stages in which they compute nothing."""


@dataclass(frozen=True)
class Checkpoint(Record):
    """A checkpoint was saved or loaded. Every rank."""

    kind: ClassVar[str] = "checkpoint"

    action: str | None
    """`save` or `load`."""
    tag: str | None
    step: int | None
    seconds: float | None
    """That training stood still."""
    nbytes: float | None
    """That this rank writes."""
    is_async: bool | None
    """The rest is written behind training."""


@dataclass(frozen=True)
class ProfileRow:
    """One module of a profiled step, what is below it included; forward alone."""

    name: str
    depth: int = 0
    parameters: float | None = None
    macs: float | None = None
    flops: float | None = None
    seconds: float | None = None
    share: float | None = None
    """Of the model's time in forward."""


@dataclass(frozen=True)
class Profile(Record):
    """What the FLOPs profiler counted. Rank 0."""

    kind: ClassVar[str] = "profile"

    step: int | None
    tree: Sequence[ProfileRow] | None


@dataclass(frozen=True)
class End(Record):
    """The engine is done, or the process has come to its end. Every rank; a killed one leaves none."""

    kind: ClassVar[str] = "end"

    step: int | None
    cause: str | None
    """`done`, or the text of the error."""


KINDS: Mapping[str, type[Record]] = {
    each.kind: each for each in (Start, Step, RankStep, Experts, Schedule, Checkpoint, Profile, End)
}
"""Kind -> its record."""


def line_of(record: Record, time_seconds: float) -> str:
    """Write a record down as one line, without the line's end; `time_seconds` are those since 1970."""
    return _ENCODER.encode({"kind": record.kind, **_members(record), "time": time_seconds})


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _members(record: Any) -> dict[str, JsonValue]:
    """By name. A dataclass without slots has its fields and nothing else in its dict, which is read faster than `fields`."""
    return {name: _plain(value) for name, value in vars(record).items()}


def _plain(value: Any) -> JsonValue:
    """What JSON can say of `value`; anything else as its text, for a log must not fail over a value that it shows."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict | Mapping):  # the first is the usual one, and asked faster
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if is_dataclass(value):
        return _members(value)
    return str(value)
