"""LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR and WarmupCosineLR: formulas of `rates` applied to parameter groups.

    schedule.step()  once per applied optimizer step, after it
        last_batch_iteration += 1 -> one rate per group -> group["lr"]   (OneCycle: group["betas"] as well)

The whole state is `last_batch_iteration`: the number of the last applied step, -1 before the first. Every value that a
schedule takes per group may be one number for all groups or a list with one number per group.

Not here: the formulas (`rates`), the command-line flags (`tuning_arguments`), torch's own schedules (`build`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

from torch.optim import Optimizer

from deepspeed.common.logging import get_logger
from deepspeed.errors import ArgumentError
from deepspeed.optim.rates import (
    Cycle,
    WarmupShape,
    cosine_factor,
    cycle_momentum,
    cycle_rate,
    decay_factor,
    range_test_factor,
    warmup_factor,
)

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

PerGroup = float | Sequence[float]
StateDict = dict[str, int]

_BETA2 = 0.99  # second beta while OneCycle moves the first; published constant

logger = get_logger(__name__)


class NotAnOptimizerError(ArgumentError, TypeError):
    """A schedule was given something that is not, and does not wrap, a torch optimizer."""


class Schedule(ABC):
    """What the five share: a step counter, one rate per parameter group, and their way into the optimizer.

    Args:
        optimizer: a `torch.optim.Optimizer`, or an object that holds one as `.optimizer`.
        last_batch_iteration: number of the last applied step; -1 starts from the beginning. The rates of that step are put
            into the parameter groups at once.

    Raises:
        TypeError: `optimizer` is neither of the two.
    """

    def __init__(self, optimizer: object, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    @abstractmethod
    def rates(self, i: int) -> list[float]:
        """Rates after step `i`, one per parameter group."""

    def get_lr(self) -> list[float]:
        """Rates after the last applied step, one per parameter group."""
        return self.rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Rates in use, one per parameter group; before the first step those that the schedule starts from."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to step `last_batch_iteration`, and write its rates into the parameter groups."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def state_dict(self) -> StateDict:
        """Return `{"last_batch_iteration": n}`."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: StateDict) -> None:
        """Continue behind the step that `state_dict` reported; its rates are put into the parameter groups."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        rates = self.rates(self.last_batch_iteration)
        groups = self.optimizer.param_groups
        if len(rates) != len(groups):
            raise ArgumentError(
                f"{type(self).__name__}: the optimizer has {len(groups)} parameter groups, the schedule was made for "
                f"{len(rates)}. Add every group before building the schedule."
            )
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates


class LRRangeTest(Schedule):
    """Raise the rate steadily to find where training diverges: lr = min_lr * (1 + rate * intervals).

    Args:
        optimizer: see `Schedule`.
        lr_range_test_min_lr: first rate; one number or one per group.
        lr_range_test_step_size: steps of one interval, above 0.
        lr_range_test_step_rate: growth per interval, as a share of the first rate.
        lr_range_test_staircase: grow only at the end of an interval.
        last_batch_iteration: see `Schedule`.

    Source: arXiv:1803.09820, section 4.1.
    """

    def __init__(
        self,
        optimizer: object,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(LR_RANGE_TEST, "lr_range_test_min_lr", lr_range_test_min_lr, torch_optimizer(optimizer))
        self.step_size = _steps(LR_RANGE_TEST, "lr_range_test_step_size", lr_range_test_step_size, least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        """Rates after step `i`, one per parameter group."""
        factor = range_test_factor(i, self.step_size, self.step_rate, self.staircase)
        return [low * factor for low in self.min_lrs]


class OneCycle(Schedule):
    """One triangle of the rate with the momentum running against it, then a decay.

    Args:
        optimizer: see `Schedule`.
        cycle_min_lr: lowest rate; one number or one per group.
        cycle_max_lr: highest rate; one number or one per group.
        decay_lr_rate: after the triangle lr = cycle_min_lr / (1 + decay_lr_rate * intervals).
        cycle_first_step_size: steps of the rise, above 0.
        cycle_second_step_size: steps of the fall; None takes those of the rise.
        cycle_first_stair_count: cut the rise into that many jumps; 0 is a straight line.
        cycle_second_stair_count: the same for the fall; None takes that of the rise.
        decay_step_size: steps of one decay interval; 0 is no decay.
        cycle_momentum: move the momentum as well; needs an optimizer with `betas`, and sets them to (momentum, 0.99).
        cycle_min_mom: lowest momentum; it also stands before the first step.
        cycle_max_mom: highest momentum.
        decay_mom_rate: after the triangle momentum = cycle_max_mom * (1 + decay_mom_rate * intervals).
        last_batch_iteration: see `Schedule`.

    Source: arXiv:1803.09820, section 4.
    """

    def __init__(
        self,
        optimizer: object,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        inner = torch_optimizer(optimizer)
        self.min_lrs = _per_group(ONE_CYCLE, "cycle_min_lr", cycle_min_lr, inner)
        self.max_lrs = _per_group(ONE_CYCLE, "cycle_max_lr", cycle_max_lr, inner)
        self.decay_lr_rate = decay_lr_rate
        first = _steps(ONE_CYCLE, "cycle_first_step_size", cycle_first_step_size, least=1)
        second = first if cycle_second_step_size is None else cycle_second_step_size
        stairs = cycle_first_stair_count
        self.cycle = Cycle(
            first=first,
            second=_steps(ONE_CYCLE, "cycle_second_step_size", second, least=0),
            first_stairs=stairs,
            second_stairs=stairs if cycle_second_stair_count is None else cycle_second_stair_count,
            decay_step_size=_steps(ONE_CYCLE, "decay_step_size", decay_step_size, least=0),
        )
        self.min_mom, self.max_mom, self.decay_mom_rate = cycle_min_mom, cycle_max_mom, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in inner.defaults
        if cycle_momentum and not self.cycle_momentum:
            logger.warning(
                "OneCycle: %s has no betas, so cycle_momentum does nothing. Set it to false.",
                type(inner).__name__,
            )
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        """Rates after step `i`, one per parameter group."""
        return [
            cycle_rate(i, self.cycle, low, high, self.decay_lr_rate)
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def get_mom(self) -> list[float]:
        """Momentum after the last applied step, one per parameter group; empty when momentum is left alone."""
        if not self.cycle_momentum:
            return []
        i = self.last_batch_iteration
        momentum = self.min_mom if i < 0 else cycle_momentum(i, self.cycle, self.min_mom, self.max_mom, self.decay_mom_rate)
        return [momentum] * len(self.min_lrs)

    def _apply(self) -> None:
        super()._apply()
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self.get_mom(), strict=True):
                group["betas"] = (momentum, _BETA2)


class WarmupLR(Schedule):
    """Raise the rate from `warmup_min_lr` to `warmup_max_lr`, then hold it.

    The first two optimizer steps run at `warmup_min_lr`: the rate before the first call of `step()`, and the one it sets.

    Args:
        optimizer: see `Schedule`.
        warmup_min_lr: rate at the start; one number or one per group.
        warmup_max_lr: rate at the end; one number, one per group, or None for the rate each group has now.
        warmup_num_steps: length of the warm-up in steps, at least 2 (1 is taken as 2); 0 is no warm-up.
        warmup_type: "log" or "linear".
        last_batch_iteration: see `Schedule`.
    """

    name = WARMUP_LR

    def __init__(
        self,
        optimizer: object,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        inner = torch_optimizer(optimizer)
        highs = [float(group["lr"]) for group in inner.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _per_group(self.name, "warmup_min_lr", warmup_min_lr, inner)
        self.max_lrs = _per_group(self.name, "warmup_max_lr", highs, inner)
        self.warmup_num_steps = _steps(self.name, "warmup_num_steps", warmup_num_steps, least=0)
        self.warmup_type = _shape(self.name, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def factor(self, i: int) -> float:
        """Share of the way from the lowest to the highest rate after step `i`."""
        return warmup_factor(i, self.warmup_num_steps, self.warmup_type)

    def rates(self, i: int) -> list[float]:
        """Rates after step `i`, one per parameter group."""
        factor = self.factor(i)
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a straight fall back to `warmup_min_lr` at step `total_num_steps`.

    Args:
        optimizer: see `Schedule`.
        total_num_steps: length of the whole run in steps, above 0.
        warmup_min_lr: see `WarmupLR`.
        warmup_max_lr: see `WarmupLR`.
        warmup_num_steps: see `WarmupLR`.
        warmup_type: see `WarmupLR`.
        last_batch_iteration: see `Schedule`.
    """

    name = WARMUP_DECAY_LR

    def __init__(
        self,
        optimizer: object,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _steps(self.name, "total_num_steps", total_num_steps, least=1)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def factor(self, i: int) -> float:
        """Share of the way from the lowest to the highest rate after step `i`."""
        return decay_factor(i, self.total_num_steps, self.warmup_num_steps, self.warmup_type)


class WarmupCosineLR(Schedule):
    """Raise each group's own rate from a share of it to the whole, then let it fall along half a cosine.

    Args:
        optimizer: see `Schedule`. The rates that its groups have now are the highest ones.
        total_num_steps: length of the whole run in steps, above 0.
        warmup_min_ratio: share of the group's rate at the first step.
        warmup_num_steps: see `WarmupLR`.
        cos_min_ratio: share of the group's rate at the end.
        warmup_type: see `WarmupLR`.
        last_batch_iteration: see `Schedule`.
    """

    def __init__(
        self,
        optimizer: object,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _steps(WARMUP_COSINE_LR, "total_num_steps", total_num_steps, least=1)
        self.warmup_num_steps = _steps(WARMUP_COSINE_LR, "warmup_num_steps", warmup_num_steps, least=0)
        self.warmup_type = _shape(WARMUP_COSINE_LR, warmup_type)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.base_lrs = [float(group["lr"]) for group in torch_optimizer(optimizer).param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        """Rates after step `i`, one per parameter group."""
        factor = cosine_factor(
            i,
            self.total_num_steps,
            self.warmup_num_steps,
            self.warmup_type,
            self.warmup_min_ratio,
            self.cos_min_ratio,
        )
        return [base * factor for base in self.base_lrs]


def torch_optimizer(given: object) -> Optimizer:
    """The torch optimizer that `given` is, or that it wraps as `.optimizer`."""
    for candidate in (given, getattr(given, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    raise NotAnOptimizerError(
        f"optimizer is a {type(given).__name__}; a schedule needs a torch.optim.Optimizer or an object that holds one as "
        ".optimizer. Pass the optimizer that deepspeed.initialize returned."
    )


def _per_group(schedule: str, key: str, given: PerGroup, optimizer: Optimizer) -> list[float]:
    """`given` as one number per parameter group."""
    groups = len(optimizer.param_groups)
    if not isinstance(given, Sequence):
        return [float(given)] * groups
    if len(given) != groups:
        raise ArgumentError(
            f"{schedule}: {key}={list(given)} has {len(given)} values for {groups} parameter groups. "
            "Give one value per group, or a single number for all."
        )
    return [float(value) for value in given]


def _steps(schedule: str, key: str, given: float, *, least: int) -> int:
    """`given` as a whole number of steps, at least `least`."""
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1 or given < least:
        raise ArgumentError(f"{schedule}: {key}={given!r}, but a whole number of steps, at least {least}, is needed.")
    return int(given)


def _shape(schedule: str, given: str) -> WarmupShape:
    """`given` when it names a warm-up shape, else "log" with a warning (published behaviour)."""
    if given in ("log", "linear"):
        return cast(WarmupShape, given)
    logger.warning('%s: warmup_type=%r is neither "log" nor "linear"; "log" is used. Correct it.', schedule, given)
    return "log"
