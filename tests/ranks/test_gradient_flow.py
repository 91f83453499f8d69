"""Gradients take the same way to the update at every ZeRO stage, also where they come, or do not come, in an unusual one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.support.engines import config, make_engine, zero
from tests.support.ranks import run_ranks

STAGES = [(0, 1), (0, 2), (1, 2), (2, 2), (2, 3), (3, 1), (3, 2)]
"""ZeRO stages and numbers of ranks."""

TINY = 2.0**-10  # 1 + TINY is 1 in bf16


class Linearly(nn.Module):
    """The gradient of every weight that is used is `factor`; row 1 of the table is looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))
        self.bias = nn.Parameter(torch.zeros(7))
        self.table = nn.Embedding(6, 2, sparse=True)
        nn.init.zeros_(self.table.weight)

    def forward(self, factor: Tensor) -> Tensor:
        rows = self.table(torch.tensor([1, 1])).sum()
        return (self.weight.sum() + self.bias.sum() + rows) * factor


def _engine(stage: int, micro_batches: int = 1, **blocks: Any) -> Any:
    model = Linearly()
    small = {"reduce_bucket_size": 16, "stage3_param_persistence_threshold": 8}
    settings = config(micro_batches, rows=1, **blocks, **zero(stage, **small))
    return make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


def _values(param: nn.Parameter, read: Callable[[nn.Parameter], Tensor | None]) -> list[float] | None:
    value = read(param)
    return None if value is None else value.unique().tolist()


def _replaced(rank: int, world_size: int, stage: int) -> None:
    engine, one = _engine(stage), torch.tensor(1.0)
    for so_far in (0.0, -6.0):  # the second window knows nothing of what was put there in the first
        engine.backward(engine(one))
        engine.module.bias.grad = torch.full((7,), 5.0)  # whole at stage 3 too; torch takes none for an empty one
        engine.step()
        assert _values(engine.module.bias, safe_get_full_fp32_param) == [so_far - 5.0]
        engine.backward(engine(one))
        engine.step()
        assert _values(engine.module.bias, safe_get_full_fp32_param) == [so_far - 6.0]
        assert _values(engine.module.table.weight, safe_get_full_fp32_param) == [2 * (so_far // 3 - 2), 0.0]


def _none_on_one_rank(rank: int, world_size: int, stage: int) -> None:
    engine, one, other = _engine(stage), torch.tensor(1.0), nn.Parameter(torch.ones(1))
    for step in (1, 2):
        loss = engine(one)
        (loss if rank == 0 else other.sum()).backward()  # a plain backward that meets no parameter calls no hook
        engine.step()
        got = _values(engine.module.bias, safe_get_full_fp32_param)
        assert got == pytest.approx([-step / world_size])


def _with_a_graph(rank: int, world_size: int, stage: int) -> None:
    engine, one = _engine(stage), torch.tensor(1.0)
    loss = engine(one)
    engine.backward(loss, retain_graph=True, create_graph=True)
    engine.backward(loss)
    engine.step()
    assert _values(engine.module.bias, safe_get_full_fp32_param) == [-2.0]


def _accumulated(rank: int, world_size: int, stage: int) -> None:
    wide = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    engine = _engine(stage, micro_batches=4, bf16={"enabled": True}, **wide)
    for factor in (1.0, TINY, TINY, TINY):
        engine.backward(engine(torch.tensor(factor, dtype=torch.bfloat16)))
        engine.step()
    assert _values(engine.module.bias, safe_get_full_fp32_param) == [-(1 + 3 * TINY) / 4]


def _averaged(rank: int, world_size: int, stage: int) -> None:
    wide = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    engine = _engine(stage, bf16={"enabled": True}, **wide)
    engine.backward(engine(torch.tensor(1.0 + rank * 2.0**-7, dtype=torch.bfloat16)))
    engine.step()
    assert _values(engine.module.bias, safe_get_full_fp32_param) == [-(1 + (world_size - 1) / 2 * 2.0**-7)]


def _read(rank: int, world_size: int, stage: int) -> None:
    engine, one = _engine(stage, micro_batches=2), torch.tensor(1.0)
    weight = engine.module.weight
    between = (None,) if world_size > 1 else (None, [0.0])  # alone at stage 0 `param.grad` is always there
    for _ in range(2):
        assert _values(weight, safe_get_full_grad) in between
        engine.backward(engine(one))
        assert world_size == 1 or safe_get_full_grad(weight) is None
        engine.step()
        engine.backward(engine(one))
        assert _values(weight, safe_get_full_grad) == [1.0]
        assert _values(engine.module.table.weight, safe_get_full_grad) == [0.0, 2.0]
        engine.step()
        assert _values(weight, safe_get_full_grad) in between


def _must_be_used(rank: int, world_size: int, stage: int) -> None:
    model = Linearly()
    settings = config(2, rows=1, **zero(stage, ignore_unused_parameters=False))
    engine, one = make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)), torch.tensor(1.0)
    with engine.no_sync():
        engine.backward(engine(one))
        engine.backward(engine(one))
    engine.allreduce_gradients()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert _values(model.bias, safe_get_full_fp32_param) == [-1.0]


WAYS = {
    "replaced by the user": _replaced,
    "none on one rank": _none_on_one_rank,
    "with a graph": _with_a_graph,
    "accumulated in more precision": _accumulated,
    "averaged in more precision": _averaged,
    "read by the user": _read,
    "reduced after backward where all must be used": _must_be_used,
}


def _all_ways(rank: int, world_size: int, stage: int, way: str) -> None:
    WAYS[way](rank, world_size, stage)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stage", "world_size"), STAGES)
def test_gradients_count_once_whatever_way_they_come(stage: int, world_size: int, way: str) -> None:
    run_ranks(_all_ways, world_size, stage, way)
