from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.original.engine_state import (
    accumulation_steps_of,
    client_state_of,
    engine_state_of,
    group_members,
    loss_scaler_of,
    shared_parameters_of,
)
from deepspeed.checkpoint.original.scaler_states import scaler_record
from deepspeed.checkpoint.original.stand_ins import LossScaler
from deepspeed.precision.loss_scaler import DynamicLossScaler


@given(
    good_steps=st.integers(0, 6),
    hysteresis=st.integers(1, 4),
    power=st.integers(0, 32),
    iteration=st.integers(0, 100),
)
def test_a_moving_scale_comes_back_from_its_record(good_steps: int, hysteresis: int, power: int, iteration: int) -> None:
    config = {"fp16": {"enabled": True, "loss_scale_window": 7, "hysteresis": 4}}
    state = {"scale": 2.0**power, "hysteresis_left": hysteresis, "good_steps": good_steps}
    assert loss_scaler_of({"loss_scaler": scaler_record(state, config, iteration)}) == state


@given(flags=st.lists(st.booleans(), max_size=40), more=st.lists(st.booleans(), max_size=20))
def test_a_scale_goes_on_from_its_record_as_if_nothing_had_been_between(flags: list[bool], more: list[bool]) -> None:
    rules: dict[str, Any] = {"scale_window": 3, "delayed_shift": 2, "raise_error_at_min_scale": False}
    scaler, resumed = DynamicLossScaler(**rules), DynamicLossScaler(**rules)
    for overflow in flags:
        scaler.update(overflow)
    config = {"fp16": {"enabled": True, "loss_scale_window": 3, "hysteresis": 2}}
    resumed.load_state_dict(loss_scaler_of({"loss_scaler": scaler_record(scaler.state_dict(), config, len(flags))}))
    for overflow in more:
        scaler.update(overflow)
        resumed.update(overflow)
    assert resumed.state == scaler.state


def test_a_fixed_scale_gives_itself_and_no_scaler_gives_nothing() -> None:
    assert loss_scaler_of({"loss_scaler": LossScaler(cur_scale=128.0, dynamic=False)}) == {"scale": 128.0}
    assert vars(scaler_record({}, None)) == {"cur_scale": 1.0, "dynamic": False}
    assert loss_scaler_of({}) == loss_scaler_of({"loss_scaler": scaler_record({}, None)}) == {}


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"gradient_accumulation_steps": 4}, 4),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, 4),
        ({"train_batch_size": 24}, 1),
        ({"gradient_accumulation_steps": "auto"}, 1),
        (None, 1),
    ],
)
def test_micro_batches_are_counted_from_the_configuration(config: Any, steps: int) -> None:
    assert accumulation_steps_of(config, dp_world_size=3) == steps
    states = [{"global_steps": 5, "dp_world_size": 3, "ds_config": config}]
    found = engine_state_of(states, frozen_parameters=[], has_frozen_parameters=True, optimizer=None, loss_scaler={})
    assert found["micro_steps"] == 5 * steps


def test_the_users_keys_are_those_that_are_not_the_engines_and_are_copies() -> None:
    stored = {"module": 1, "ds_version": "0.19.8", "universal_checkpoint_info": {}, "epoch": 7, "history": [1, 2]}
    found = client_state_of(stored)
    assert found == {"epoch": 7, "history": [1, 2]}
    found["history"].append(3)
    assert client_state_of(stored) == {"epoch": 7, "history": [1, 2]}


def test_ties_of_all_files_are_known() -> None:
    """At ZeRO stage 3 only the first rank's file lists them."""
    assert shared_parameters_of([{"shared_params": {"b": "a"}}, {"shared_params": {}}, {"shared_params": None}, {}]) == {
        "b": "a"
    }


def test_members_of_groups_come_from_all_stages_of_a_pipeline() -> None:
    first, last = [{"tied": 1, "0.w": 1}, {"0.b": 1}], [{"tied": 1, "1.w": 1}, {"1.b": 1}]
    assert group_members([first, last], 2) == [["tied", "0.w", "1.w"], ["0.b", "1.b"]]


def test_sub_groups_of_one_group_belong_together_and_of_several_nobody_knows() -> None:
    assert group_members([[{"a": 1}, {"b": 1}, {"c": 1}]], 1) == [["a", "b", "c"]]
    assert group_members([[{"a": 1}, {"b": 1}, {"c": 1}]], 2) == []
