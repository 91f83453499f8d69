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
