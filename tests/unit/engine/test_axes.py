"""The ranks that ZeRO works among, over torch's fake back end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed.comm.world import reset_world
from deepspeed.engine.axes import ModelAxes
from deepspeed.topology.mesh import ParallelMesh
from deepspeed.zero.flat import Kind

DENSE = Kind(0, torch.float32, torch.float32)
EXPERT = dataclasses.replace(DENSE, is_expert=True)


@pytest.fixture(autouse=True)
def _accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield
    reset_world()


def axes(rank: int, stage: int, *, world_size: int = 8, pipe: int = 1, expert: int = 1) -> ModelAxes:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    mesh = ParallelMesh.build(pipe=pipe)
    return ModelAxes.of(mesh if expert == 1 else mesh.with_experts(expert), stage)


@pytest.mark.parametrize(("stage", "shard", "replica"), [(0, 1, 4), (1, 4, 1), (2, 4, 1), (3, 4, 1)])
def test_experts_have_the_ranks_that_hold_the_same_experts(stage: int, shard: int, replica: int) -> None:
    found = axes(5, stage, expert=2)
    experts = found.of_kind(EXPERT)
    assert experts.data.ranks == (1, 3, 5, 7)
    assert (experts.shard.size, experts.replica.size) == (shard, replica)
    assert found.of_kind(DENSE).data.ranks == tuple(range(8))
    assert found.whole.size == 8


def test_without_spread_experts_both_kinds_have_the_same_ranks() -> None:
    found = axes(2, 1)
    assert found.of_kind(EXPERT) is found.of_kind(DENSE)
    assert found.counts(DENSE)


@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_every_element_of_a_model_counts_once(pipe: int, stage: int) -> None:
    """Of whole parameters at stage 0 one rank's count; shards at stage 1 are each their own."""
    dense, experts = [], []
    for rank in range(8):
        found = axes(rank, stage, pipe=pipe, expert=2)
        assert found.whole.size == 8
        dense += [found.counts(DENSE)]
        experts += [found.counts(EXPERT)]
        reset_world()
        dist.destroy_process_group() if dist.is_initialized() else None
    copies = {0: (pipe, 2 * pipe), 1: (8, 8)}[stage]  # of each stage's dense parts, and of each half of its experts
    assert (sum(dense), sum(experts)) == copies


@pytest.mark.parametrize(("stage", "pipe", "whole"), [(0, 1, 1), (1, 1, 8), (0, 2, 2), (1, 2, 8)])
def test_without_experts_copies_are_not_among_the_ranks_that_add_up(stage: int, pipe: int, whole: int) -> None:
    found = axes(0, stage, pipe=pipe)
    assert (found.whole.size, found.counts(DENSE)) == (whole, True)
