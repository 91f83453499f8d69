from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.sharding.estimate import model_states

GB = 1e9


def test_a_model_of_13_billion_parameters_on_16_ranks_needs_what_the_guide_says() -> None:
    needs = {stage: model_states(13 * 10**9, stage, 16) for stage in range(4)}
    assert needs[0].nbytes == 208 * GB
    assert needs[1].parameter_nbytes == needs[1].gradient_nbytes == 26 * GB
    assert needs[1].optimizer_nbytes == 9.75 * GB
    assert needs[1].nbytes == 61.75 * GB
    assert needs[2].nbytes == (26 + 182 / 16) * GB
    assert needs[3].nbytes == 13 * GB


@given(numel=st.integers(0, 10**12), world_size=st.integers(1, 1024))
def test_each_stage_needs_no_more_than_the_one_before_and_all_ranks_together_hold_everything(
    numel: int, world_size: int
) -> None:
    needs = [model_states(numel, stage, world_size).nbytes for stage in range(4)]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] == 16 * numel
    assert needs[3] * world_size == pytest.approx(needs[0])


def test_bytes_per_parameter_are_arguments() -> None:
    states = model_states(10, 2, 2, parameter_nbytes=4, gradient_nbytes=4, optimizer_nbytes=8)
    assert (states.parameter_nbytes, states.gradient_nbytes, states.optimizer_nbytes) == (40, 20, 40)


@pytest.mark.parametrize(("stage", "world_size"), [(4, 1), (-1, 1), (1, 0)])
def test_impossible_arguments_are_refused(stage: int, world_size: int) -> None:
    with pytest.raises(ArgumentError, match="needed a ZeRO stage of 0 to 3 and at least 1 rank"):
        model_states(1, stage, world_size)
