"""Sharded parameters on several ranks, without an engine: each rank computes with whole parameters, and holds its shard.

Gradients are those of each rank alone (no reducer), so plain copies of the model say what is right, bit for bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.prefetch import GatherSettings
from tests.support.ranks import run_ranks
from tests.support.sharded import Sharded, assert_same, gradients, shard
from tests.support.sharded_models import BLOCK_NUMEL, Gpt, Uses, inputs, tokens

SETTINGS = [
    GatherSettings(),
    GatherSettings(max_reuse_numel=0),
    GatherSettings(max_live_numel=0, prefetch_numel=0),
    GatherSettings(is_sequential=True, max_reuse_numel=0),
    GatherSettings(by_all_reduce=True),
]


def _axis(rank: int, world_size: int) -> AxisGroup:
    return AxisGroup(range(world_size), rank, torch.distributed.group.WORLD)


def _shard(model: Any, rank: int, world_size: int, settings: GatherSettings, may_share_memory: bool) -> Sharded:
    return shard(
        model,
        settings,
        axis=_axis(rank, world_size),
        limit_numel=BLOCK_NUMEL,
        may_share_memory=may_share_memory,
    )


def _forward(sharded: Sharded, *args: Any) -> Any:
    with sharded.coordinator.forward_scope():
        return sharded.model(*args)


def _whole_while_it_computes(rank: int, world_size: int, may_share_memory: bool) -> None:
    for settings in SETTINGS:
        torch.manual_seed(1)
        model = Gpt()
        numel = sum(p.numel() for p in model.parameters())
        sharded = _shard(copy.deepcopy(model), rank, world_size, settings, may_share_memory)
        held = sum(flat.values.numel() for flat in sharded.flats)
        assert numel / world_size <= held <= numel / world_size + 16 * (len(list(model.parameters())) + 5)
        for step in range(2):
            batch = tokens(7 * step + rank)
            got, want = _forward(sharded, batch), model(batch)
            assert torch.equal(got, want)
            sharded.backward(got)
            want.backward()
            assert_same(gradients(sharded.model), gradients(model))
            sharded.model.zero_grad()
            model.zero_grad()
            with torch.inference_mode():
                assert torch.equal(_forward(sharded, batch), model(batch))
            sharded.coordinator.before_update()
            for flat in sharded.flats:
                with flat.rewriting():
                    flat.values.mul_(0.5)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        assert_same(sharded.whole(), dict(model.named_parameters()))
        sharded.coordinator.remove(gather=True)
        assert_same(dict(sharded.model.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("may_share_memory", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_computes_with_whole_parameters_and_holds_its_shard(world_size: int, may_share_memory: bool) -> None:
    run_ranks(_whole_while_it_computes, world_size, may_share_memory)


def _one_rank_edits(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    sharded = _shard(Uses(lambda m, x: m.first(x)), rank, world_size, GatherSettings(), may_share_memory=True)
    params = [sharded.model.first.weight, sharded.model.second.bias]
    coordinator = sharded.coordinator
    with torch.no_grad():
        for source in range(world_size):
            _forward(sharded, inputs())  # whole, and kept, when the edit comes
            coordinator.fetch(params)
            for param in params:
                param.add_(rank + 1)
            coordinator.store(params, source)
            coordinator.drop(params)
        coordinator.fetch(params)
        params[0].fill_(rank)  # not stored
        coordinator.drop(params)
    return sharded.whole()


def test_the_values_of_one_rank_become_those_of_all() -> None:
    torch.manual_seed(1)
    model = Uses(lambda m, x: m.first(x))
    want = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name in ("first.weight", "second.bias"):
        for source in range(3):
            want[name] = want[name] + (source + 1)  # rounds in between, as the ranks do
    for got in run_ranks(_one_rank_edits, 3):
        assert_same(got, want)


def _one_rank_skips(rank: int, world_size: int) -> tuple[float, int]:
    torch.manual_seed(1)
    model = Uses(lambda m, x: m.second(m.first(x)).sum() if rank else m.first(x).sum())
    sharded = _shard(model, rank, world_size, GatherSettings(max_reuse_numel=0), may_share_memory=True)
    for _ in range(3):
        loss = _forward(sharded, inputs())
        sharded.backward(loss)
        sharded.coordinator.before_update()
        comm.barrier()
    return loss.item(), sharded.coordinator.live_numel


def test_ranks_that_share_memory_may_use_different_modules() -> None:
    (first, live_first), (second, live_second) = run_ranks(_one_rank_skips, 2)
    assert live_first == live_second == 0
    assert first != second
