"""The lines of a run log as typed values.

    {"kind": "step", "time": 1764.5, "step": 12, "loss": 2.5, ...}  -->  Step(time=1764.5, step=12, loss=2.5, ...)

Readers are more tolerant than writers: a log may come from another version. What is absent or null is not known (None or
empty), unknown keys are passed over, a kind without a type here is no record. Seconds and bytes throughout; `time` is in
seconds of the Unix clock. Does not live here: files and attempts (`reading`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, JsonValue, TypeAdapter
from pydantic.dataclasses import dataclass

__all__ = [
    "KINDS",
    "CheckpointRecord",
    "CommTotal",
    "End",
    "Experts",
    "Profile",
    "ProfileRow",
    "RankStep",
    "Record",
    "Schedule",
    "Start",
    "Step",
    "record_of",
]

_TOLERANT = ConfigDict(extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class Start:
    """A rank's engine begins, or begins again after a restart."""

    time: float
    rank: int
    world_size: int | None = None
    version: str | None = None
    host: str | None = None
    pid: int | None = None
    device: str | None = None
    mesh: dict[str, int] | None = None
    model: str | None = None
    parameters: int | None = None
    config: dict[str, JsonValue] | None = None
    peak_flops: float | None = None
    restarts: int | None = None
    plan: dict[str, float | None] | None = None
    """Bytes that this rank was planned to hold, by term; a term elsewhere than on the device says so: `masters (host)`."""
    step: int | None = None
    host_bytes: float | None = None
    """What the process held before its engine was built, the model's tensors left out."""


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class Step:
    """One reported global step, told by the first rank."""

    time: float
    step: int
    samples: float | None = None
    loss: float | None = None
    lr: tuple[float | None, ...] | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None
    seconds: float | None = None
    samples_per_second: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None
    more: dict[str, float | None] | None = None


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class CommTotal:
    """One collective operation of one rank since its last record."""

    count: float = 0
    nbytes: float = 0
    seconds: float = 0


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class RankStep:
    """One rank's own view of a reported step."""

    time: float
    step: int
    host_bytes: float | None = None
    device_bytes: float | None = None
    device_peak_bytes: float | None = None
    phases: dict[str, float | None] | None = None
    """Seconds per step."""
    comm: dict[str, CommTotal | None] | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class Experts:
    """Shares of tokens per expert, by layer."""

    time: float
    step: int
    layers: dict[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class Schedule:
    """One batch of a pipeline."""

    time: float
    name: str | None = None
    stages: int | None = None
    micro_batches: int | None = None
    text: str | None = None
    works: tuple[tuple[int, float, float, str, int | None], ...] = ()
    """Stage, start, end, kind (`F`, `B`, ...), micro-batch."""
    bubble: float | None = None


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class CheckpointRecord:
    """A checkpoint that was saved or loaded."""

    time: float
    action: str = "save"
    tag: str | None = None
    step: int | None = None
    seconds: float | None = None
    nbytes: float | None = None
    is_async: bool | None = None


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class ProfileRow:
    """One module of the profiled step."""

    name: str
    depth: int = 0
    parameters: float | None = None
    macs: float | None = None
    flops: float | None = None
    seconds: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class Profile:
    """The tree of the FLOPS profiler."""

    time: float
    step: int | None = None
    tree: tuple[ProfileRow, ...] = ()


@dataclass(frozen=True, slots=True, config=_TOLERANT)
class End:
    """A rank's engine ended."""

    time: float
    step: int | None = None
    cause: str | None = None
    """`done`, or an error's text."""


Record = Start | Step | RankStep | Experts | Schedule | CheckpointRecord | Profile | End

_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {
    "start": TypeAdapter(Start),
    "step": TypeAdapter(Step),
    "rank_step": TypeAdapter(RankStep),
    "experts": TypeAdapter(Experts),
    "schedule": TypeAdapter(Schedule),
    "checkpoint": TypeAdapter(CheckpointRecord),
    "profile": TypeAdapter(Profile),
    "end": TypeAdapter(End),
}
KINDS: tuple[str, ...] = tuple(_ADAPTERS)
"""Kinds of lines that have a type here."""


def record_of(kind: str, values: Mapping[str, Any]) -> Record | None:
    """The record of a line's values; None: a kind that this version does not know.

    Raises:
        ValueError: a value has another type than its key's (pydantic's ValidationError).
    """
    adapter = _ADAPTERS.get(kind)
    record: Record | None = None if adapter is None else adapter.validate_python(values)
    return record
