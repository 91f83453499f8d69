"""What names of optimizers tell is what the optimizers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.config.optimizer import KNOWN_OPTIMIZERS, OptimizerConfig
from deepspeed.errors import ConfigError
from deepspeed.optim.build import build_optimizer
from deepspeed.optim.kept import kept_tensors
from deepspeed.optim.state_tensors import state_tensors

_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.5, "weight_decay": 0.1},
    {"eps": 1e-3},
    {"betas": [0.5, 0.5]},
    {"bias_correction": False},
    {"adam_w_mode": False},
    {"set_grad_none": False},
    {"fp32_optimizer_states": False},
    {"max_coeff": 3.0, "min_coeff": 0.5},
    {"eps_inside_sqrt": True},
)


def _blocks(name: str) -> list[OptimizerConfig]:
    """With each of the options that the type has."""
    known = OptimizerConfig.params_model(name).model_fields
    return [OptimizerConfig(type=name, params=options) for options in _OPTIONS if options.keys() <= known.keys()]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", [name for name in KNOWN_OPTIMIZERS if kept_tensors(name, {}) is not None])
def test_a_name_tells_what_the_optimizer_keeps(name: str, on_host: bool) -> None:
    blocks = _blocks(name)
    assert len(blocks) > 2
    for block in blocks:
        optimizer = build_optimizer(block, [nn.Parameter(torch.empty(2, 2))], on_host=on_host)
        kept = state_tensors(optimizer, optimizer.param_groups[0], torch.float32)
        assert list(kept.values()) == [torch.float32] * len(kept)
        assert kept_tensors(block.type, block.params) == len(kept), block


@pytest.mark.parametrize(
    ("name", "params"),
    [("Adam", {"torch_adam": True, "amsgrad": True}), ("Adagrad", {"lr_decay": 0.1}), ("SGD", {}), ("Muon", {})],
)
def test_what_a_name_does_not_tell_is_unknown(name: str, params: dict[str, Any]) -> None:
    block = OptimizerConfig(type=name, params=params)
    assert kept_tensors(block.type, block.params) is None


def test_options_that_the_builder_refuses_are_not_passed_over() -> None:
    block = OptimizerConfig(type="Adam", params={"max_grad_norm": 1.0})
    assert kept_tensors(block.type, block.params) is None
    with pytest.raises(ConfigError, match="max_grad_norm"):
        build_optimizer(block, [nn.Parameter(torch.empty(2))])
