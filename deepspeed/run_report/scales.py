"""From values to places on a chart: ranges, round ticks, linear and logarithmic axes. Pure.

    values 0.3 .. 9.1   -->   axis 0 .. 10, ticks 0 2.5 5 7.5 10   -->   0.3 lies at 3 % of its length

Called by `charts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Scale", "Tick", "scale_of", "step_scale"]

_FARTHEST = 1e290  # beyond it, sums and differences of two values overflow
_NEAREST = 1e-280  # below it, parts of a difference are no longer numbers
_TICKS = 5


@dataclass(frozen=True)
class Tick:
    """A place on an axis, in percent of its length from its low end, and what is written there."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high` > `low`; of logarithms where `is_log`, and then both are positive."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end, and at the nearest end where it lies beyond."""
        if value <= self.low:  # also where a logarithm has no value for it
            return 0.0
        low, high, mine = (
            (math.log(each) for each in (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        )
        return min(1.0, (mine - low) / (high - low))

    def ticks(self, text: Callable[[float], str], most: int = _TICKS) -> list[Tick]:
        """Round values along the axis, at most `most` + 1 of them."""
        return [Tick(100 * self.at(value), text(value)) for value in self._round_values(most)]

    def _round_values(self, most: int) -> list[float]:
        if self.is_log:
            return _powers(self.low, self.high, most)
        step = _round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [at * step for at in range(first, last + 1)]


def scale_of(values: Iterable[float], *, from_zero: bool = False, may_be_log: bool = False) -> Scale:
    """An axis that holds all values, its ends round.

    Args:
        values: what will be drawn.
        from_zero: the axis begins at zero, or lower where a value does.
        may_be_log: it is logarithmic where values are positive and their largest is more than 50 times the smallest.
    """
    known = [min(max(value, -_FARTHEST), _FARTHEST) for value in values]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if may_be_log and low > _NEAREST and high > 50 * low:
        return Scale(
            10 ** (math.floor(10 * math.log10(low)) / 10), 10 ** (math.ceil(10 * math.log10(high)) / 10), is_log=True
        )
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _NEAREST):  # one value, or values that differ by rounding
        around = abs(high) / 2 if abs(high) > _NEAREST else 0.5
        low, high = (low if from_zero and low == 0 else low - around), high + around
    step = _round_step((high - low) / _TICKS) / 2
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


def step_scale(steps: Iterable[float]) -> Scale:
    """An axis of steps, exactly from the first to the last."""
    known = list(steps) or [0.0]
    low, high = min(known), max(known)
    return Scale(low, high) if high > low else Scale(low - 0.5, high + 0.5)


def step_ticks(scale: Scale) -> list[Tick]:
    """Round whole steps."""
    ticks = scale.ticks(lambda value: f"{value:,.0f}" if value == round(value) else "")
    return [tick for tick in ticks if tick.label]


def _round_step(rough: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten."""
    if rough <= 1e-300:
        return 1e-300
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough * (1 - 1e-9)), 10 * power)


def _powers(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between the ends; of two where there are fewer than two of ten."""
    exponents: Sequence[int] = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    base = 10.0
    if len(exponents) < 3:
        base = 2.0
        exponents = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    every = -(-len(exponents) // (most + 1)) or 1
    return [base**exponent for exponent in exponents[::every]]
