"""The loss scale: what a loss is multiplied by so that small 16-bit gradients do not vanish.

                   overflow, tolerance used up                  window good steps in a row
    scale / 2  <-------------------------------  scale  ------------------------------->  scale * 2
    (not below the minimum)                        |                                      tolerance refilled
                                                   | overflow, tolerance left: one less of it

`next_state` is the whole machine, a pure function; the classes hold a state and the rules. Every scaler has `scale`,
`update(overflow)` once per optimizer step with the same answer on all ranks, and plain values as state.

Source: mixed precision training (arXiv:1710.03740), section 3.2, with hysteresis.

Not here: putting the scale on a loss (`engine.loss_guard`), finding overflows (`zero.norm`). Built by `engine.terms`,
updated by `zero.optimizer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deepspeed.errors import ArgumentError, NonFiniteError
from deepspeed.precision.formats import PrecisionConfig
from deepspeed.precision.policy import autocast_dtype

_LARGEST_SCALE = 2.0**127  # the largest power of two that float32 holds


@dataclass(frozen=True)
class ScaleRules:
    """What moves a dynamic scale."""

    window: int
    """Good steps in a row after which the scale grows, at least 1."""
    hysteresis: int
    """Overflows after which the scale falls, at least 1; 1 falls at once."""
    consecutive: bool
    """Each good step forgets earlier overflows."""
    min_scale: float
    """The scale does not fall below this, above 0."""
    raise_at_min: bool
    """An overflow that cannot lower the scale any more is an error."""
    factor: float
    """By how much the scale grows and falls, above 1."""


@dataclass(frozen=True)
class ScaleState:
    """Where a dynamic scale stands."""

    scale: float
    hysteresis_left: int
    """Overflows until the scale falls, at least 1."""
    good_steps: int
    """Steps since the last overflow or growth."""


def next_state(state: ScaleState, overflow: bool, rules: ScaleRules) -> ScaleState:
    """State after one step with or without overflow.

    Raises:
        NonFiniteError: an overflow at the minimum with nothing left to tolerate, unless the rules let it pass.
    """
    return _after_overflow(state, rules) if overflow else _after_good_step(state, rules)


def _after_overflow(state: ScaleState, rules: ScaleRules) -> ScaleState:
    if state.hysteresis_left > 1:
        return ScaleState(state.scale, state.hysteresis_left - 1, good_steps=0)
    if state.scale <= rules.min_scale and rules.raise_at_min:
        raise NonFiniteError(
            f"gradients overflow although the loss scale is at its minimum, {rules.min_scale:g}: a smaller scale will not "
            "help. Look for infinities in the model or its input, lower the learning rate, or use bf16."
        )
    return ScaleState(max(state.scale / rules.factor, rules.min_scale), state.hysteresis_left, good_steps=0)


def _after_good_step(state: ScaleState, rules: ScaleRules) -> ScaleState:
    is_full = state.good_steps + 1 >= rules.window
    return ScaleState(
        scale=min(state.scale * rules.factor, _LARGEST_SCALE) if is_full else state.scale,
        hysteresis_left=rules.hysteresis if is_full or rules.consecutive else state.hysteresis_left,
        good_steps=0 if is_full else state.good_steps + 1,
    )


class LossScaler:
    """A scale that stays as it is, and the base of the others.

    Args:
        scale: the factor on the loss, finite and above 0.

    Raises:
        ArgumentError: `scale` is not.
    """

    dynamic = False

    def __init__(self, scale: float = 1) -> None:
        self._scale = _positive("scale", scale)

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """Accept its own attributes, or those of the original, whose files name this class."""
        if "cur_scale" in fields:
            self._scale = float(fields["cur_scale"])
        else:
            self.__dict__.update(fields)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scale

    @property
    def loss_scale(self) -> float:
        """The same, under its published name."""
        return self.scale

    @property
    def cur_scale(self) -> float:
        """The same, under its published name."""
        return self.scale

    def update(self, overflow: bool) -> None:
        """Take note of a step: whether any gradient on any rank was infinite or NaN."""

    def update_scale(self, overflow: bool) -> None:
        """The same as `update`, under its published name."""
        self.update(overflow)

    def state_dict(self) -> dict[str, float]:
        """Plain values for `load_state_dict`."""
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Accept any scaler's state. A fixed scale is the config's business, so nothing is taken from it."""


StaticLossScaler = LossScaler


class NullScaler(LossScaler):
    """Scale 1: for formats that need none."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def state_dict(self) -> dict[str, float]:
        """Nothing: training that goes on in fp16 begins with the scale of its config, not with 1."""
        return {}


class DynamicLossScaler(LossScaler):
    """A scale that halves on overflow and doubles after a window of good steps.

    Args:
        init_scale: first scale.
        scale_window: good steps in a row after which it doubles.
        min_scale: it does not fall below this.
        delayed_shift: hysteresis: overflows after which it halves; 1 halves at once.
        consecutive_hysteresis: each good step forgets earlier overflows.
        raise_error_at_min_scale: an overflow at the minimum is an error.
        dtype: format of the scaled gradients, kept for readers.
        scale_factor: by how much it grows and falls.

    Raises:
        ArgumentError: a value makes no sense.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.float16,
        *,
        scale_factor: float = 2.0,
    ) -> None:
        self.rules = ScaleRules(
            window=_at_least_one("scale_window", scale_window),
            hysteresis=_at_least_one("delayed_shift", delayed_shift),
            consecutive=consecutive_hysteresis,
            min_scale=_positive("min_scale", min_scale),
            raise_at_min=raise_error_at_min_scale,
            factor=_positive("scale_factor", scale_factor),
        )
        self.dtype = dtype
        self.state = ScaleState(_positive("init_scale", init_scale), self.rules.hysteresis, good_steps=0)

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """Accept its own attributes, or those of the original, whose files name this class."""
        if "cur_scale" not in fields:
            self.__dict__.update(fields)
            return
        rules = ("scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis", "raise_error_at_min_scale", "dtype")
        DynamicLossScaler.__init__(self, **{name: fields[name] for name in rules if name in fields})
        self.load_state_dict(state_from_published(fields))

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self.state.scale

    def update(self, overflow: bool) -> None:
        """Move the scale; once per optimizer step, with the same answer on all ranks.

        Raises:
            NonFiniteError: see `next_state`; the state stays as it was.
        """
        self.state = next_state(self.state, overflow, self.rules)

    def state_dict(self) -> dict[str, float]:
        """Plain values for `load_state_dict`."""
        return asdict(self.state)

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Continue from another scaler's state; that of a fixed scale gives the scale alone, an empty one nothing."""
        if not state_dict:
            return
        self.state = ScaleState(
            scale=float(state_dict["scale"]),
            hysteresis_left=int(state_dict.get("hysteresis_left", self.rules.hysteresis)),
            good_steps=int(state_dict.get("good_steps", 0)),
        )


def state_from_published(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A scaler's state from the attributes that the original stores of its scaler.

    It counts from the iteration of its last overflow and grows first at the window's end plus one; `DynamicLossScaler`
    counts the good steps themselves.
    """
    state: dict[str, Any] = {"scale": float(fields.get("cur_scale", 1.0))}
    if "cur_iter" in fields:
        good_steps = max(int(fields["cur_iter"]) - int(fields.get("last_overflow_iter", -1)) - 2, 0)
        state["good_steps"] = good_steps % max(int(fields.get("scale_window", 1000)), 1)
    if "cur_hysteresis" in fields:
        state["hysteresis_left"] = int(fields["cur_hysteresis"])
    return state


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScaler:
    """Make the scaler for gradients of `dtype`: only fp16 needs one.

    Args:
        dtype: format of the model.
        static_loss_scale: the fixed scale, unless `dynamic_scaling`.
        dynamic_scaling: whether the scale moves.
        dynamic_loss_args: arguments of `DynamicLossScaler` other than `dtype`; None takes the defaults.
    """
    if dtype != torch.float16:
        return NullScaler()
    if dynamic_scaling:
        return DynamicLossScaler(**(dynamic_loss_args or {}), dtype=dtype)
    return LossScaler(static_loss_scale)


def build_loss_scaler(config: PrecisionConfig, device_type: str | None = None) -> LossScaler:
    """Make the scaler that a config asks for.

    fp16, and forward under fp16 autocast, get the scale of the `fp16` block; anything else needs none. `device_type` is
    where forward runs, None the accelerator's.
    """
    fp16 = config.fp16
    if not fp16.enabled and autocast_dtype(config, device_type) != torch.float16:
        return NullScaler()
    dynamic = {
        "init_scale": 2.0**fp16.initial_scale_power,
        "scale_window": fp16.loss_scale_window,
        "min_scale": fp16.min_loss_scale,
        "delayed_shift": fp16.hysteresis,
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
    }
    return CreateLossScaler(torch.float16, fp16.loss_scale, fp16.loss_scale == 0, dynamic)


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name}={value!r}, but a finite number above 0 is needed.")
    return float(value)


def _at_least_one(name: str, value: int) -> int:
    if value < 1 or value != int(value):
        raise ArgumentError(f"{name}={value!r}, but a whole number of at least 1 is needed.")
    return int(value)
