"""Optimizer and scheduler blocks."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deepspeed.config.base import faults_of
from deepspeed.config.optimizer import KNOWN_OPTIMIZERS, OptimizerConfig
from deepspeed.config.scheduler import KNOWN_SCHEDULES, SchedulerConfig

REQUIRED: dict[str, dict[str, Any]] = {
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1},
    "WarmupDecayLR": {"total_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 10},
}


def refused(model: type[OptimizerConfig | SchedulerConfig], kind: str, **params: Any) -> list[str]:
    with pytest.raises(ValidationError) as error:
        model.model_validate({"type": kind, "params": params})
    return [fault.path for fault in faults_of(error.value.errors(include_url=False))]


@pytest.mark.parametrize("name", KNOWN_OPTIMIZERS)
def test_a_known_optimizer_is_found_in_any_case(name: str) -> None:
    for spelling in (name, name.lower(), name.upper()):
        assert OptimizerConfig(type=spelling).type == name


@pytest.mark.parametrize("name", KNOWN_SCHEDULES)
def test_a_known_schedule_is_found_in_any_case(name: str) -> None:
    assert SchedulerConfig(type=name.lower(), params=REQUIRED.get(name, {})).type == name


@pytest.mark.parametrize("name", [*KNOWN_OPTIMIZERS])
def test_an_unknown_parameter_of_an_optimizer_is_refused(name: str) -> None:
    if name.startswith("Mu") and name != "Muon":
        assert OptimizerConfig(type=name, params={"anything": 1}).params["anything"] == 1  # the mup package checks
    else:
        assert refused(OptimizerConfig, name, lrr=1) == ["params.lrr"]


@pytest.mark.parametrize("name", KNOWN_SCHEDULES)
def test_an_unknown_parameter_of_a_schedule_is_refused(name: str) -> None:
    assert refused(SchedulerConfig, name, warmup_steps=1, **REQUIRED.get(name, {})) == ["params.warmup_steps"]


def test_parameters_of_torch_classes_pass_through() -> None:
    block = OptimizerConfig(type="SGD", params={"lr": 0.1, "momentum": 0.9})
    assert (block.type, block.params) == ("SGD", {"lr": 0.1, "momentum": 0.9})
    assert SchedulerConfig(type="StepLR", params={"step_size": 3}).params == {"step_size": 3}


@pytest.mark.parametrize(("name", "key"), [("AdamW", "lr"), ("AdamW", "betas"), ("SGD", "lr"), ("Muon", "momentum")])
def test_auto_is_refused_in_optimizer_parameters(name: str, key: str) -> None:
    assert refused(OptimizerConfig, name, **{key: "auto"}) == [f"params.{key}"]


@pytest.mark.parametrize(
    ("name", "key"), [("WarmupLR", "warmup_num_steps"), ("WarmupDecayLR", "total_num_steps"), ("StepLR", "step_size")]
)
def test_auto_is_refused_in_scheduler_parameters(name: str, key: str) -> None:
    assert refused(SchedulerConfig, name, **{**REQUIRED.get(name, {}), key: "auto"}) == [f"params.{key}"]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("Adam", {"lr": -1}),
        ("Adam", {"eps": -1e-8}),
        ("Adam", {"betas": [0.9, 1.0]}),
        ("Adam", {"foreach": True}),
        ("Lamb", {"amsgrad": True}),
        ("Lion", {"weight_decay": "much"}),
        ("OneBitAdam", {"freeze_step": 0}),
        ("Muon", {"ns_method": "other"}),
    ],
)
def test_senseless_optimizer_parameters_are_refused(name: str, params: dict[str, Any]) -> None:
    assert refused(OptimizerConfig, name, **params) == [f"params.{key}" for key in params]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("LRRangeTest", {"lr_range_test_step_size": 0}),
        ("OneCycle", {"cycle_first_step_size": 0}),
        ("OneCycle", {"decay_step_size": -1}),
        ("WarmupLR", {"warmup_num_steps": -1}),
        ("WarmupLR", {"warmup_type": "cubic"}),
        ("WarmupDecayLR", {"total_num_steps": 0}),
        ("WarmupCosineLR", {"cos_min_ratio": -1}),
    ],
)
def test_senseless_scheduler_parameters_are_refused(name: str, params: dict[str, Any]) -> None:
    assert refused(SchedulerConfig, name, **{**REQUIRED.get(name, {}), **params}) == [f"params.{key}" for key in params]


def test_torch_arguments_of_adam_need_torch_adam() -> None:
    assert OptimizerConfig(type="Adam", params={"foreach": True, "torch_adam": True}).params["foreach"] is True


def test_what_builders_see_leaves_out_what_was_not_given() -> None:
    assert "foreach" not in OptimizerConfig(type="Adam").params
    assert "warmup_max_lr" not in SchedulerConfig(type="WarmupLR").params
    assert "cycle_second_step_size" not in SchedulerConfig(type="OneCycle", params=REQUIRED["OneCycle"]).params


def test_warmup_lr_tolerates_what_hugging_face_leaves() -> None:
    assert "total_num_steps" not in SchedulerConfig(type="WarmupLR", params={"total_num_steps": 100}).params


def test_warm_up_may_be_empty_and_may_fill_the_whole_run() -> None:
    assert SchedulerConfig(type="WarmupLR", params={"warmup_num_steps": 0}).params["warmup_num_steps"] == 0
    for name in ("WarmupDecayLR", "WarmupCosineLR"):
        SchedulerConfig(type=name, params={"total_num_steps": 2, "warmup_num_steps": 2})


def test_rates_may_differ_by_group() -> None:
    params = SchedulerConfig(type="WarmupLR", params={"warmup_min_lr": [0, 0.1], "warmup_max_lr": [1, 2]}).params
    assert (params["warmup_min_lr"], params["warmup_max_lr"]) == ([0.0, 0.1], [1.0, 2.0])


def test_required_parameters_are_named() -> None:
    assert refused(SchedulerConfig, "OneCycle") == ["params.cycle_min_lr", "params.cycle_max_lr"]
