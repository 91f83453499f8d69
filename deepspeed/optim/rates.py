r"""The formulas of the learning-rate schedules: an iteration and a shape in, a number out.

    rate
     |      ____                       warmup_factor   i < W rises, then 1
     |     /    \                      decay_factor    ... then falls in a line to 0 at T
     |    /      \___                  cosine_factor   ... then falls along half a cosine to its floor
     |___/            \
     +---W---------T----  i

Notation: `i` counts applied optimizer steps from 0 (-1: none yet), `W` is the length of the warm-up and `T` the length of
the run, both in steps. Nothing here knows an optimizer; `schedules` multiplies these factors into parameter groups.

Sources: warm-up, Goyal et al. (arXiv:1706.02677) section 2.2; cosine, SGDR (arXiv:1608.03983) equation 5; cycles and range
test, Smith (arXiv:1506.01186 and arXiv:1803.09820).

Called by `schedules` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WarmupShape = Literal["log", "linear"]


def range_test_factor(i: int, step_size: int, step_rate: float, staircase: bool) -> float:
    """Factor on the lowest rate: 1 + step_rate * x, where x counts intervals of `step_size` (whole ones: `staircase`)."""
    steps = i + 1
    intervals = steps // step_size if staircase else steps / step_size
    return 1 + step_rate * intervals


def warmup_steps(warmup_num_steps: int) -> int:
    """Length W of the warm-up: 0 is none at all, anything else at least 2 because ln(W) and i/W need a span."""
    return 0 if warmup_num_steps == 0 else max(2, warmup_num_steps)


def warmup_factor(i: int, warmup_num_steps: int, shape: WarmupShape) -> float:
    """Rise from 0 at the first steps to 1 at step W: i/W, or ln(i+1)/ln(W) for "log". It stays 1 afterwards."""
    steps = warmup_steps(warmup_num_steps)
    if i >= steps:
        return 1.0
    if i < 0:
        return float(steps == 0)
    return math.log(i + 1) / math.log(steps) if shape == "log" else i / steps


def decay_factor(i: int, total_num_steps: int, warmup_num_steps: int, shape: WarmupShape) -> float:
    """`warmup_factor`, then a straight fall that reaches 0 at step `total_num_steps` and stays there."""
    steps = warmup_steps(warmup_num_steps)
    if i < steps:
        return warmup_factor(i, warmup_num_steps, shape)
    return max(0.0, (total_num_steps - i) / max(1, total_num_steps - steps))


def cosine_factor(
    i: int,
    total_num_steps: int,
    warmup_num_steps: int,
    shape: WarmupShape,
    warmup_min_ratio: float,
    cos_min_ratio: float,
) -> float:
    """Warm-up from `warmup_min_ratio` to 1, then half a cosine down to `cos_min_ratio` at step `total_num_steps`."""
    steps = warmup_steps(warmup_num_steps)
    if i < 0:
        return float(
            steps == 0
        )  # a warm-up rests at 0 before the first step, whatever `warmup_min_ratio`: published behaviour
    if i < steps:
        return warmup_min_ratio + (1 - warmup_min_ratio) * warmup_factor(i, warmup_num_steps, shape)
    progress = min(1.0, (i - steps + 1) / max(1, total_num_steps - steps))
    return max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


@dataclass(frozen=True)
class Cycle:
    r"""One triangle up and down, then an optional decay.

        scale 1      /\
                    /  \            first half: `first` steps, second half: `second` steps;
              0   _/    \____       stairs > 0 cut a half into that many equal jumps
                   first second

    `decay_step_size` is the length in steps of one decay interval; 0 means no decay.
    """

    first: int
    second: int
    first_stairs: int = 0
    second_stairs: int = 0
    decay_step_size: int = 0

    @property
    def length(self) -> int:
        """Steps of the whole triangle."""
        return self.first + self.second

    def is_over(self, i: int) -> bool:
        """Whether the triangle has ended and the decay runs."""
        return i >= self.length

    def scale(self, i: int) -> float:
        """Height in [0, 1] after step `i` of the triangle. Integer arithmetic, so that the stairs fall exactly."""
        at = (i + 1) % self.length
        if at <= self.first:
            return _stairs(at, self.first, self.first_stairs)
        return _stairs(self.length - at, self.second, self.second_stairs)

    def decay_intervals(self, i: int) -> float:
        """Decay intervals elapsed after step `i`, which lies behind the triangle; 0 without decay."""
        return (i - self.length + 1) / self.decay_step_size if self.decay_step_size else 0.0


def _stairs(done: int, half: int, stairs: int) -> float:
    """Share of a half that `done` of its steps cover, rounded down to whole stairs when there are some."""
    return (done * stairs // half) / stairs if stairs > 0 else done / half


def cycle_rate(i: int, cycle: Cycle, low: float, high: float, decay_rate: float) -> float:
    """Rate after step `i`: between `low` and `high` along the triangle, then low / (1 + decay_rate * intervals)."""
    if not cycle.is_over(i):
        return low + (high - low) * cycle.scale(i)
    return low / (1 + decay_rate * cycle.decay_intervals(i))


def cycle_momentum(i: int, cycle: Cycle, low: float, high: float, decay_rate: float) -> float:
    """Momentum after step `i`: high where the rate is low; behind the triangle high * (1 + decay_rate * intervals)."""
    if not cycle.is_over(i):
        return high - (high - low) * cycle.scale(i)
    return high * (1 + decay_rate * cycle.decay_intervals(i))
