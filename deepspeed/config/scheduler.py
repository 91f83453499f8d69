"""The block `scheduler`: the schedules that this library knows, and the names of the models of their parameters.

Lives here: names. Does not live here: parameters (`config.scheduler_params`), the formulas (`optim.schedules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from deepspeed.config.typed import TypedBlock
from deepspeed.config.values import Freeform

__all__ = ["KNOWN_SCHEDULES", "SchedulerConfig"]

KNOWN_SCHEDULES: Mapping[str, str] = {
    "LRRangeTest": "scheduler_params:LRRangeTestParams",
    "OneCycle": "scheduler_params:OneCycleParams",
    "WarmupLR": "scheduler_params:WarmupLRParams",
    "WarmupDecayLR": "scheduler_params:WarmupDecayLRParams",
    "WarmupCosineLR": "scheduler_params:WarmupCosineLRParams",
}
"""Type -> model of its parameters. Any other type is a class of `torch.optim.lr_scheduler`."""


class SchedulerConfig(TypedBlock):
    """`scheduler`: which learning-rate schedule the engine builds when it is handed none."""

    known: ClassVar[Mapping[str, str]] = KNOWN_SCHEDULES

    type: str = Field(min_length=1)
    """A schedule of this library, in any case, or the exact name of a class in `torch.optim.lr_scheduler`."""

    params: Freeform = Field(default_factory=dict, validate_default=True)
    """Keyword arguments of that type."""
