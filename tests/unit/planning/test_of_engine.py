"""The plan in a run log has the terms that `deepspeed.plan` shows."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import deepspeed
from deepspeed.config import DeepSpeedConfig
from deepspeed.planning.of_engine import terms_of_engine

_OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, **_OFFLOAD}])
def test_terms_are_those_of_the_plan(zero: dict[str, Any]) -> None:
    raw = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    wanted: dict[str, int] = {}
    for term in deepspeed.plan(module, raw, 2, device_type="cuda").asked.terms:
        name = term.name if term.tier == "device" else f"{term.name} ({term.tier})"
        wanted[name] = wanted.get(name, 0) + term.nbytes
    config = DeepSpeedConfig(raw, dp_world_size=2, world_size=2)
    assert terms_of_engine(module, config, 2, "cuda") == wanted
