"""Values that ranks must hold alike, compared over real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.zero.sanity import ValuesDifferError, agree, held_alike
from tests.support.ranks import run_ranks


def _flip(tensor: torch.Tensor, bit: int) -> None:
    words = tensor.view(torch.int32)
    words[-1] ^= 1 << bit


def _engine(stage: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    loss = engine(torch.full((2, 8), 1.0 + engine.global_rank)).square().mean()
    engine.backward(loss)
    engine.step()
    return engine


def _compared(rank: int, world_size: int, stage: int) -> Any:
    engine = _engine(stage)
    axis = engine._parts.mesh.data_parallel
    held = list(held_alike(engine.optimizer.master.flats))
    agree(held, axis)
    if rank == world_size - 1:
        _flip(next(engine.module.parameters()).detach().view(-1), bit=0)
    with pytest.raises(ValuesDifferError) as caught:
        agree(held, axis)
    return str(caught.value), len(held)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_flipped_bit_on_one_rank_is_settled_to_all_with_bucket_parameters_and_rank(stage: int) -> None:
    for text, count in run_ranks(_compared, 3, stage):
        assert count
        assert "values that ranks [0, 1, 2] must hold alike differ" in text
        assert "bucket 0 (1.bias, 1.weight, 0.bias and 1 more) on rank(s) [2]" in text
        assert "GatheredParameters" in text


def _sharded(_rank: int, _world_size: int) -> int:
    return len(list(held_alike(_engine(3).optimizer.master.flats)))


def test_what_is_sharded_is_held_by_nobody_alike() -> None:
    assert run_ranks(_sharded, 2) == [0, 0]
