"""The schedule formulas, against the sentences that define them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.optim.rates import (
    Cycle,
    cosine_factor,
    cycle_momentum,
    cycle_rate,
    decay_factor,
    range_test_factor,
    warmup_factor,
    warmup_steps,
)

SHAPES = st.sampled_from(["log", "linear"])
STEPS = st.integers(0, 200)
CYCLES = st.builds(
    Cycle,
    first=st.integers(1, 40),
    second=st.integers(0, 40),
    first_stairs=st.integers(0, 5),
    second_stairs=st.integers(0, 5),
)


@given(w=STEPS, shape=SHAPES)
def test_warmup_rises_from_zero_to_one_and_stays(w: int, shape: str) -> None:
    factors = [warmup_factor(i, w, shape) for i in range(-1, warmup_steps(w) + 3)]
    assert factors == sorted(factors)
    assert factors[0] == (1.0 if w == 0 else 0.0)
    assert factors[-3:] == [1.0, 1.0, 1.0]


def test_a_warmup_of_one_step_is_taken_as_two() -> None:
    assert [warmup_factor(i, 1, "linear") for i in range(3)] == [0.0, 0.5, 1.0]


@given(w=STEPS, extra=st.integers(1, 200), shape=SHAPES)
def test_decay_reaches_zero_exactly_at_the_last_step(w: int, extra: int, shape: str) -> None:
    total = warmup_steps(w) + extra
    factors = [decay_factor(i, total, w, shape) for i in range(-1, total + 3)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[-3:] == [0.0, 0.0, 0.0]
    assert factors[total] > 0  # one step before
    fall = factors[1 + warmup_steps(w) :]
    assert fall == sorted(fall, reverse=True)


@given(total=st.integers(1, 50), w=STEPS, shape=SHAPES)
def test_a_warmup_longer_than_the_run_never_divides_by_zero(total: int, w: int, shape: str) -> None:
    for i in range(-1, 260):
        assert 0 <= decay_factor(i, total, w, shape) <= 1
        assert 0 <= cosine_factor(i, total, w, shape, 0.1, 0.01) <= 1


@given(w=STEPS, extra=st.integers(1, 200), shape=SHAPES, low=st.floats(0, 1), floor=st.floats(0, 1))
def test_cosine_ends_at_its_floor(w: int, extra: int, shape: str, low: float, floor: float) -> None:
    total = warmup_steps(w) + extra
    for i in (total - 1, total, total + 7):
        assert cosine_factor(i, total, w, shape, low, floor) == pytest.approx(floor, abs=1e-12)


def test_cosine_without_warmup_starts_at_the_full_rate() -> None:
    assert cosine_factor(-1, 10, 0, "log", 0.3, 0.1) == 1.0
    assert cosine_factor(4, 10, 0, "log", 0.3, 0.0) == pytest.approx(0.5)


def test_cosine_warmup_starts_at_its_lowest_share_once_a_step_was_made() -> None:
    assert cosine_factor(-1, 10, 4, "linear", 0.2, 0.1) == 0.0
    assert cosine_factor(0, 10, 4, "linear", 0.2, 0.1) == pytest.approx(0.2)


@given(i=st.integers(-1, 500), size=st.integers(1, 50), rate=st.floats(0, 10))
def test_staircase_of_the_range_test_is_the_line_rounded_down(i: int, size: int, rate: float) -> None:
    assert range_test_factor(i, size, rate, True) == 1 + rate * math.floor((i + 1) / size)
    assert range_test_factor(i, size, rate, True) <= range_test_factor(i, size, rate, False)


@given(cycle=CYCLES, i=st.integers(-1, 100))
def test_cycle_scale_equals_the_published_fraction(cycle: Cycle, i: int) -> None:
    n, b = cycle.first + cycle.second, i + 1
    x, s = (b / n) % 1.0, cycle.first / n
    if cycle.first_stairs == cycle.second_stairs == 0:
        want = x / s if x <= s else (x - 1) / (s - 1)
        assert cycle.scale(i) == pytest.approx(want, abs=1e-9)
    assert 0 <= cycle.scale(i) <= 1


@given(first=st.integers(1, 60), stairs=st.integers(1, 6))
def test_stairs_take_only_whole_steps_of_height(first: int, stairs: int) -> None:
    cycle = Cycle(first, first, stairs, stairs)
    heights = {round(cycle.scale(i) * stairs, 9) for i in range(-1, cycle.length)}
    assert heights <= set(range(stairs + 1))
    assert max(heights) == stairs


@given(cycle=CYCLES, i=st.integers(0, 300), rate=st.floats(0, 2))
def test_without_a_decay_interval_the_rate_rests_at_its_low_end(cycle: Cycle, i: int, rate: float) -> None:
    if cycle.is_over(i):
        assert cycle_rate(i, cycle, 0.1, 1.0, rate) == 0.1
        assert cycle_momentum(i, cycle, 0.8, 0.9, rate) == 0.9


@given(cycle=CYCLES, i=st.integers(-1, 79))
def test_momentum_runs_against_the_rate(cycle: Cycle, i: int) -> None:
    if not cycle.is_over(i):
        rate, momentum = cycle_rate(i, cycle, 0.0, 1.0, 0.0), cycle_momentum(i, cycle, 0.0, 1.0, 0.0)
        assert rate + momentum == pytest.approx(1.0)
