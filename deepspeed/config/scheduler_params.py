"""Parameters of the schedules: LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR.

Lives here: `scheduler.params` of these types, with defaults and ranges. Does not live here: the formulas
(`optim.schedules`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from deepspeed.config.typed import ParamsModel
from deepspeed.config.values import (
    Freeform,
    LowerCase,
    NonNegativeNumber,
    NonNegativeWhole,
    Number,
    PerGroup,
    PositiveWhole,
    Whole,
)

__all__ = ["LRRangeTestParams", "OneCycleParams", "WarmupCosineLRParams", "WarmupDecayLRParams", "WarmupLRParams"]


class _Schedule(ParamsModel):
    last_batch_iteration: Annotated[Whole, Field(ge=-1)] = -1
    """Step before the first one; -1 is a fresh start."""


class LRRangeTestParams(_Schedule):
    """`scheduler.params` of LRRangeTest: raise the rate steadily to find the largest that works (arXiv:1506.01186)."""

    lr_range_test_min_lr: PerGroup = 1e-3
    """First rate; a list has one per parameter group."""

    lr_range_test_step_size: PositiveWhole = 2000
    """Steps per unit of growth; > 0."""

    lr_range_test_step_rate: Number = 1.0
    """Growth per unit, as a multiple of the first rate."""

    lr_range_test_staircase: bool = False
    """Grow once per unit instead of every step."""


class OneCycleParams(_Schedule):
    """`scheduler.params` of OneCycle: up, down, then decay (arXiv:1803.09820)."""

    left_out_when_none: ClassVar[frozenset[str]] = frozenset(("cycle_second_step_size", "cycle_second_stair_count"))

    cycle_min_lr: PerGroup
    """Rate at both ends of the cycle; a list has one per parameter group. Required."""

    cycle_max_lr: PerGroup
    """Rate in the middle of the cycle; a list has one per parameter group. Required."""

    decay_lr_rate: NonNegativeNumber = 0.0
    """Decay of the rate after the cycle; 0 is none."""

    cycle_first_step_size: PositiveWhole = 2000
    """Steps of the first half; > 0."""

    cycle_second_step_size: NonNegativeWhole | None = None
    """Steps of the second half. Left out: as the first."""

    cycle_first_stair_count: NonNegativeWhole = 0
    """Stairs in the first half; 0 is a straight line."""

    cycle_second_stair_count: NonNegativeWhole | None = None
    """Stairs in the second half. Left out: as the first."""

    decay_step_size: NonNegativeWhole = 0
    """Steps per unit of decay after the cycle; 0 is no decay."""

    cycle_momentum: bool = True
    """Move momentum against the rate."""

    cycle_min_mom: Annotated[Number, Field(ge=0, lt=1)] = 0.8
    """Momentum in the middle of the cycle."""

    cycle_max_mom: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Momentum at both ends of the cycle."""

    decay_mom_rate: NonNegativeNumber = 0.0
    """Change of momentum after the cycle; 0 is none."""


class _Warmup(_Schedule):
    warmup_num_steps: NonNegativeWhole = 1000
    """Steps of warm-up; 0 is no warm-up."""

    warmup_type: Annotated[Literal["log", "linear"], LowerCase] = "log"
    """Shape of the warm-up."""


class WarmupLRParams(_Warmup):
    """`scheduler.params` of WarmupLR: rise to a constant rate."""

    left_out_when_none: ClassVar[frozenset[str]] = frozenset(("warmup_max_lr", "total_num_steps"))

    warmup_min_lr: PerGroup = 0.0
    """First rate; a list has one per parameter group."""

    warmup_max_lr: PerGroup | None = None
    """Final rate; a list has one per parameter group. Left out: each group's own rate."""

    total_num_steps: NonNegativeWhole | None = None
    """Accepted and not used: Hugging Face configurations leave it here."""

    def as_params(self) -> Freeform:
        """Return the keyword arguments, without the one that is not used."""
        params = super().as_params()
        params.pop("total_num_steps", None)
        return params


class WarmupDecayLRParams(_Warmup):
    """`scheduler.params` of WarmupDecayLR: rise, then fall in a straight line to the first rate."""

    total_num_steps: PositiveWhole
    """Step at which the fall ends; may equal `warmup_num_steps`. Required."""

    warmup_min_lr: PerGroup = 0.0
    """First and last rate; a list has one per parameter group."""

    warmup_max_lr: PerGroup = 1e-3
    """Highest rate; a list has one per parameter group."""


class WarmupCosineLRParams(_Warmup):
    """`scheduler.params` of WarmupCosineLR: rise, then fall along a cosine; all as ratios of each group's own rate."""

    total_num_steps: PositiveWhole
    """Step at which the fall ends; may equal `warmup_num_steps`. Required."""

    warmup_min_ratio: NonNegativeNumber = 0.0
    """First rate, as a ratio."""

    cos_min_ratio: NonNegativeNumber = 1e-4
    """Last rate, as a ratio."""
