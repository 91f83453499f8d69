"""Where a rank's experts lie in the tensors that a checkpoint holds."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.config.parallel import ExpertParallelConfig
from deepspeed.engine.experts import gather_experts_together, is_name_of_experts, name_on_rank, spread_experts
from deepspeed.engine.stretches import Stretches
from deepspeed.moe.auto_ep import apply_auto_ep
from deepspeed.zero.leaf import get_z3_leaf_modules
from tests.unit.moe.test_auto_ep import Block
from tests.unit.moe.test_stacked import EXPERTS, INNER, WIDTH, Stack


def _model(ep_size: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), Block(Stack()))
    apply_auto_ep(model, ExpertParallelConfig(enabled=True, autoep_size=ep_size))
    return model


def test_stacked_experts_are_stretches_and_everything_else_is_whole() -> None:
    found = Stretches(_model(2))
    assert "1.experts.down_proj" in found
    assert "1.gate.weight" not in found
    assert found.of("1.experts.down_proj", (2, WIDTH, INNER)).shape == (EXPERTS, WIDTH, INNER)
    assert found.of("1.gate.weight", (EXPERTS, WIDTH)) == ((EXPERTS, WIDTH), 0, EXPERTS)
    assert found.of("a scalar", ()).start == 0
    value = torch.zeros(EXPERTS, WIDTH)
    assert found.part("1.gate.weight", value) is value


def test_on_one_rank_there_are_none() -> None:
    assert "1.experts.down_proj" not in Stretches(_model(1))


def test_the_engine_takes_them_for_experts_under_one_name_on_all_ranks() -> None:
    model = _model(2)
    experts = dict(model[1].experts.named_parameters())  # type: ignore[union-attr]
    assert spread_experts(model) == {id(param) for param in experts.values()}
    assert all(is_name_of_experts(model)(f"1.experts.{name}") for name in experts)
    assert not is_name_of_experts(model)("1.gate.weight")
    assert name_on_rank(model)("1.experts.down_proj") == "1.experts.down_proj"
    gather_experts_together(model)
    assert get_z3_leaf_modules(model) == [model[1].experts]  # type: ignore[union-attr]
