from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.moe.experts import Experts
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Experts(nn.Linear(4, 4), 2, "ep_size_2"), nn.Linear(4, 2))


def _count(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": len(group["params"])} for group in groups]


def test_layers_of_other_libraries_are_not_taken_for_ours() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].is_moe_layer = True  # as decoder layers of Llama 4 are marked
    assert has_moe_layers(model) == (False, 0)


def test_only_experts_are_experts() -> None:
    model = _model()
    assert [name for name, p in model.named_parameters() if is_moe_param(p)] == [
        f"1.deepspeed_experts.{number}.{part}" for number in (0, 1) for part in ("weight", "bias")
    ]
    shared, experts = split_params_into_shared_and_expert_params(model.parameters())
    assert [len(shared), len(experts)] == [4, 4]


def test_gradients_are_split_likewise_and_missing_ones_left_out() -> None:
    model = _model()
    params = list(model.parameters())
    for param in params[:4]:
        param.grad = torch.ones_like(param)
    shared, experts = split_params_grads_into_shared_and_expert_params(params)
    assert [*map(id, shared)] == [id(p.grad) for p in params[:2]]
    assert [*map(id, experts)] == [id(p.grad) for p in params[2:4]]


@pytest.mark.parametrize(
    "wrap", [lambda group: group, lambda group: [group], lambda group: (group,)], ids=["dict", "list", "tuple"]
)
def test_experts_get_groups_that_keep_the_options(wrap: Any) -> None:
    group = {"params": list(_model().parameters()), "name": "all", "lr": 0.1}
    groups = split_params_into_different_moe_groups_for_optimizer(wrap(group))
    assert _count(groups) == [
        {"params": 4, "name": "all", "lr": 0.1},
        {"params": 4, "name": "ep_size_2", "lr": 0.1, "moe": True},
    ]
    assert len(group["params"]) == 8  # what was given stays
    assert [is_moe_param_group(each) for each in groups] == [False, True]
    assert _count(split_params_into_different_moe_groups_for_optimizer(groups)) == _count(groups)


def test_groups_of_experts_follow_all_others_and_none_is_empty() -> None:
    dense = nn.Parameter(torch.ones(3))
    groups = [{"params": _model().parameters(), "lr": 0.1}, {"params": [dense], "lr": 0.2}]
    assert _count(split_params_into_different_moe_groups_for_optimizer(groups)) == [
        {"params": 4, "lr": 0.1},
        {"params": 1, "lr": 0.2},
        {"params": 4, "lr": 0.1, "name": "ep_size_2", "moe": True},
    ]


@given(numels=st.lists(st.integers(1, 9), min_size=1, max_size=8), limit=st.one_of(st.none(), st.integers(1, 20)))
def test_large_groups_are_split_in_order_and_only_single_parameters_exceed_the_limit(
    numels: list[int], limit: int | None
) -> None:
    params = [nn.Parameter(torch.ones(numel)) for numel in numels]
    for param in params:
        param.allreduce, param.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    _, *groups = split_params_into_different_moe_groups_for_optimizer({"params": params}, max_group_size=limit)
    assert [id(p) for group in groups for p in group["params"]] == [*map(id, params)]
    sizes = [[p.numel() for p in group["params"]] for group in groups]
    if limit is None:
        assert len(groups) == 1
    else:
        assert all(sum(each) <= limit or len(each) == 1 for each in sizes)
        assert all(sum(one) + two[0] > limit for one, two in itertools.pairwise(sizes))


def test_what_a_client_gave_becomes_groups() -> None:
    params = list(_model().parameters())
    assert _count(configure_moe_param_groups(params)) == [
        {"params": 4, "name": "dense-params"},
        {"params": 4, "name": "ep_size_2", "moe": True},
    ]
    given = [{"params": params, "name": "mine"}]
    assert _count(configure_moe_param_groups(given)) == [
        {"params": 4, "name": "mine"},
        {"params": 4, "name": "ep_size_2", "moe": True},
    ]


def test_parameters_in_place_of_groups_are_refused_with_the_cure() -> None:
    with pytest.raises(ArgumentError, match=r"got Parameter as a group.*\"params\": list"):
        split_params_into_different_moe_groups_for_optimizer(list(_model().parameters()))  # type: ignore[arg-type]
    mixed: list[Any] = [nn.Parameter(torch.ones(2)), {"params": []}]
    with pytest.raises(ArgumentError, match="Parameter as a group"):
        configure_moe_param_groups(mixed)
