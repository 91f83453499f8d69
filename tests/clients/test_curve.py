"""The rule that runs of clients are compared by does catch a difference, and what they are compared with is DDP."""

from __future__ import annotations

import pytest

from tests.support.clients import assert_same_curve, on_gloo
from tests.support.ranks import run_ranks


def test_curves_that_differ_are_told_apart() -> None:
    assert_same_curve([2.0, 1.0 + 5e-6], [2.0, 1.0])
    for got, expected in (([2.0, 1.0 + 2e-5], [2.0, 1.0]), ([2.0], [2.0, 1.0]), ([2.0, 2.0], [2.0, 2.0])):
        with pytest.raises(AssertionError):
            assert_same_curve(got, expected)


def _seen(rank: int, world_size: int, client: dict[str, str]) -> tuple[str, int]:
    on_gloo(client)
    from accelerate import PartialState

    state = PartialState()
    return state.distributed_type.value, state.num_processes


def test_a_client_without_us_is_distributed() -> None:
    assert run_ranks(_seen, 2, {}, init=False) == [("MULTI_CPU", 2)] * 2
    assert run_ranks(_seen, 2, {"ACCELERATE_USE_DEEPSPEED": "true"}, init=False) == [("DEEPSPEED", 2)] * 2
