from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.alike import description, first_difference


def _lines(config: dict[str, Any], module: nn.Module, optimizer: Any = None) -> list[str]:
    sizes = {"train_micro_batch_size_per_gpu": 2}
    return description(DeepSpeedConfig({**sizes, **config}, dp_world_size=1), module, optimizer)


def _pair(one: Any, other: Any) -> nn.Module:
    return nn.ModuleDict({"one": one, "other": other})


def test_what_ranks_may_choose_for_themselves_is_no_difference() -> None:
    here = {"steps_per_print": 5, "csv_monitor": {"enabled": True, "output_path": "/a"}, "fp16": {"enabled": False}}
    assert _lines(here, nn.Linear(2, 2)) == _lines({"wall_clock_breakdown": True}, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"gradient_accumulation_steps": 3}, ("config train_batch_size: 2", "config train_batch_size: 6")),
        ({"zero_optimization": {"stage": 2}}, ("no config zero_optimization.stage", "config zero_optimization.stage: 2")),
        ({"bf16": {"enabled": True}}, ("no config bf16.enabled", "config bf16.enabled: True")),
    ],
)
def test_the_first_config_key_that_differs_is_named(config: dict[str, Any], wanted: tuple[str, str]) -> None:
    assert first_difference(_lines({}, nn.Linear(2, 2)), _lines(config, nn.Linear(2, 2))) == wanted


def test_modules_in_another_order_shape_or_state_differ() -> None:
    small, large = nn.Linear(2, 2, bias=False), nn.Linear(3, 3, bias=False)
    usual = _lines({}, _pair(small, large))
    here, there = first_difference(usual, _lines({}, _pair(large, small)))
    assert here == "parameter 0: 'one.weight', shape (2, 2), torch.float32, trained"
    assert there == "parameter 0: 'one.weight', shape (3, 3), torch.float32, trained"
    frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
    assert first_difference(usual, _lines({}, _pair(small, frozen)))[1].endswith("frozen")
    more = nn.ModuleDict({"one": small, "other": large, "third": nn.BatchNorm1d(2)})
    assert first_difference(usual, _lines({}, more))[0] == "no parameter 2"


def test_the_order_of_parameters_in_the_optimizer_counts() -> None:
    module = nn.Linear(2, 2)
    one = torch.optim.SGD([module.weight, module.bias], lr=0.1)
    other = torch.optim.SGD([module.bias, module.weight], lr=0.1)
    assert first_difference(_lines({}, module, one), _lines({}, module, other)) == (
        "optimizer group 0: 'weight', 'bias'",
        "optimizer group 0: 'bias', 'weight'",
    )
    assert first_difference(_lines({}, module, one), _lines({}, module, one)) == ("", "")
