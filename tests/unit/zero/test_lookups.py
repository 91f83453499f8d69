"""`deepspeed.zero.lookups`: a parameter is gathered when a forward looks it up, and at no other time."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from deepspeed.zero.prefetch import GatherSettings
from tests.support.sharded import shard
from tests.support.sharded_models import Gpt, Uses, inputs

NOTHING_KEPT = GatherSettings(max_reuse_numel=0)


def test_looking_at_a_parameter_outside_a_forward_gathers_nothing() -> None:
    sharded = shard(Gpt(), NOTHING_KEPT)
    assert sharded.model.wte.weight.shape == torch.Size([0])
    assert dict(sharded.model.named_parameters())["pos"].shape == torch.Size([0])
    assert all(v.shape == torch.Size([0]) for v in sharded.model.state_dict().values())
    assert sharded.coordinator.live_numel == 0


def test_iterating_over_parameters_inside_a_forward_gathers_nothing() -> None:
    shapes: list[torch.Size] = []
    sharded = shard(Uses(lambda m, x: shapes.extend(p.shape for p in m.second.parameters()) or m.first(x)), limit_numel=1)
    with sharded.coordinator.forward_scope():
        sharded.model(inputs())
    assert shapes == [torch.Size([0])] * 2


def test_copies_and_pickles_of_a_module_know_nothing_of_the_coordinator() -> None:
    sharded = shard(Uses(lambda m, x: m.first(x)), NOTHING_KEPT)
    for parameters in (
        copy.copy(sharded.model.first._parameters),
        sharded.model.first._parameters.copy(),
        pickle.loads(pickle.dumps(sharded.model.first._parameters)),
        copy.deepcopy(sharded.model.first._parameters),
    ):
        assert type(parameters) is dict
        assert parameters.keys() == {"weight", "bias"}


def test_a_parameter_that_takes_the_place_of_a_sharded_one_is_an_ordinary_one() -> None:
    sharded = shard(Uses(lambda m, x: m.first(x)), NOTHING_KEPT, limit_numel=1)
    own = sharded.model.first.weight
    sharded.model.first.weight = nn.Parameter(torch.zeros(8, 8))
    sharded.model.first.bias = None
    with sharded.coordinator.forward_scope():
        assert sharded.model(inputs()).abs().sum() == 0
    sharded.model.first.weight = own  # as torch.func.functional_call does when it is done
    with sharded.coordinator.forward_scope():
        assert sharded.model(inputs()).abs().sum() > 0


def test_functional_calls_may_replace_sharded_parameters() -> None:
    sharded = shard(Uses(lambda m, x: m.first(x)), NOTHING_KEPT, limit_numel=1)
    whole = sharded.whole()
    with sharded.coordinator.forward_scope():
        got = torch.func.functional_call(sharded.model, {"first.weight": 2 * whole["first.weight"]}, (inputs(),))
    assert torch.equal(got, nn.functional.linear(inputs(), 2 * whole["first.weight"], whole["first.bias"]))
    assert sharded.model.first.weight.shape == torch.Size([0])
