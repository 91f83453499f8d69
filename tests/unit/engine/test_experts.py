"""What an engine finds out about a model's experts."""

from __future__ import annotations

import pytest
from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.experts import (
    gather_experts_together,
    is_name_of_experts,
    moe_layers,
    name_on_rank,
    refuse_for_experts,
    spread_experts,
)
from deepspeed.errors import UnbuiltFeatureError
from deepspeed.moe.experts import Experts, expert_group_name
from deepspeed.zero.leaf import get_z3_leaf_modules


class Layer(nn.Module):
    is_deepspeed_moe_layer = True

    def __init__(self, ep_size: int, place: int = 0) -> None:
        super().__init__()
        self.ep_size, self.num_experts = ep_size, 4
        self.gate = nn.Linear(2, 4)
        self.experts = Experts(nn.BatchNorm1d(2), 4 // ep_size, expert_group_name(ep_size))
        self.experts.place(place)


def test_parameters_and_buffers_of_spread_experts_are_told_from_all_others() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Layer(2, place=1), Layer(1))
    found, is_theirs = spread_experts(model), is_name_of_experts(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    assert {name for name, tensor in named if id(tensor) in found} == {name for name, _ in named if is_theirs(name)}
    assert {name.rpartition(".")[0] for name, _ in named if is_theirs(name)} == {
        "1.experts.deepspeed_experts.2",
        "1.experts.deepspeed_experts.3",
    }


def test_a_layer_that_is_used_in_two_places_has_both_names() -> None:
    layer = Layer(2, place=1)
    is_theirs = is_name_of_experts(nn.Sequential(layer, nn.Linear(2, 2), layer))
    assert is_theirs("0.experts.deepspeed_experts.2.weight")
    assert is_theirs("2.experts.deepspeed_experts.2.weight")
    assert not is_theirs("2.gate.weight")


def test_names_by_place_are_alike_on_all_ranks() -> None:
    ranks = [nn.Sequential(Layer(2, place=place)) for place in range(2)]
    shown = [[name_on_rank(model)(name) for name, _ in model.named_parameters()] for model in ranks]
    assert shown[0] == shown[1]
    assert "0.experts.deepspeed_experts.1.weight" in shown[0]


def test_layers_are_found_by_name_and_experts_gathered_as_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Layer(1))
    model[0].is_moe_layer = True  # as decoder layers of Llama 4 are marked
    assert [name for name, _ in moe_layers(model)] == ["1"]
    gather_experts_together(model)
    assert get_z3_leaf_modules(model) == [model[1].experts]


def settings(stage: int, **zero: object) -> DeepSpeedConfig:
    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **zero}})


def test_what_does_not_work_with_spread_experts_is_refused_with_the_cure() -> None:
    zenflow = {
        "zenflow": {
            "topk_ratio": 0.1,
            "update_interval": 2,
            "full_warm_up_rounds": 0,
            "select_strategy": "step",
            "select_interval": 2,
        }
    }
    with pytest.raises(UnbuiltFeatureError, match=r"zenflow with experts.*ep_size=1"):
        refuse_for_experts(settings(2, offload_optimizer={"device": "cpu"}, **zenflow))
    refuse_for_experts(settings(2))
