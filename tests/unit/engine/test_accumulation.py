"""The boundary question, in its three modes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.engine.accumulation import Accumulation
from deepspeed.errors import UsageError


@given(st.integers(1, 9), st.integers(0, 40))
def test_every_nth_micro_batch_is_a_boundary(steps: int, micro_steps: int) -> None:
    accumulation = Accumulation(steps)
    accumulation.micro_steps = micro_steps
    assert accumulation.is_step_boundary == ((micro_steps + 1) % steps == 0)
    assert accumulation.is_backward_boundary == accumulation.is_step_boundary


@given(st.integers(1, 9), st.integers(0, 40), st.booleans())
def test_what_the_caller_set_wins_over_the_count(steps: int, micro_steps: int, is_boundary: bool) -> None:
    accumulation = Accumulation(steps)
    accumulation.micro_steps = micro_steps
    accumulation.set_boundary(is_boundary)
    assert accumulation.is_step_boundary is is_boundary


@given(st.integers(1, 6), st.integers(0, 12), st.integers(1, 6))
def test_after_a_change_windows_have_the_new_length(before: int, micro_batches: int, after: int) -> None:
    accumulation = Accumulation(before)
    for _ in range(micro_batches):
        accumulation.advance()
    accumulation.change_steps(after)
    left = after - min(micro_batches % before, after - 1)
    boundaries = []
    for _ in range(left + 2 * after):
        boundaries.append(accumulation.is_step_boundary)
        accumulation.advance()
    assert [i + 1 for i, is_boundary in enumerate(boundaries) if is_boundary] == [left, left + after, left + 2 * after]


@given(st.integers(1, 6), st.integers(0, 40))
def test_a_whole_window_comes_after_a_checkpoint(steps: int, micro_steps: int) -> None:
    accumulation = Accumulation(steps)
    accumulation.restart(micro_steps)
    assert accumulation.micro_steps == micro_steps
    seen = []
    for _ in range(steps):
        seen.append(accumulation.is_step_boundary)
        accumulation.advance()
    assert seen == [False] * (steps - 1) + [True]


def test_a_client_that_writes_the_counter_counts_windows_from_zero() -> None:
    accumulation = Accumulation(4)
    accumulation.restart(5)
    accumulation.micro_steps = 7
    assert accumulation.is_step_boundary


def test_unmanaged_every_step_updates_and_no_backward_reduces_early() -> None:
    accumulation = Accumulation(4, is_managed=False)
    assert accumulation.is_step_boundary
    assert not accumulation.is_backward_boundary
    assert accumulation.divisor == 1


def test_unmanaged_the_boundary_cannot_be_set() -> None:
    with pytest.raises(UsageError, match="managed_gradient_accumulation"):
        Accumulation(4, is_managed=False).set_boundary(True)


@given(st.integers(1, 9), st.lists(st.booleans(), min_size=1, max_size=6))
def test_each_loss_counts_as_divided_once_whoever_divides(steps: int, divided_here: list[bool]) -> None:
    """The weight of a backward is its loss factor over the window's divisor: 1/steps, or 1 where the caller has divided."""
    accumulation = Accumulation(steps)
    factors = [accumulation.loss_factor(scale_wrt_gas=here) for here in divided_here]
    for here, factor in zip(divided_here, factors, strict=True):
        assert factor / accumulation.divisor == pytest.approx(1 / steps if here else 1.0)
    accumulation.close_window()
    assert accumulation.divisor == steps
