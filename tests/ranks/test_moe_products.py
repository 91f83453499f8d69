"""Experts that multiply by the other of torch's two libraries train as they do by the first, at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.ops import host_products
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import make_batches
from tests.support.moe_models import moe_net
from tests.support.ranks import run_ranks
from tests.support.reference import relative_difference

STEPS, ROWS, RATE = 3, 5, 0.05


def _masters(rank: int, world_size: int, stage: int) -> Any:
    model = moe_net((4,), 2, torch.float32, k=2)
    batches = make_batches(moe_net((4,), 1, torch.float32, k=2), STEPS, 1, world_size, ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    blocks = zero(stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    engine = make_engine(model, config(1, ROWS, **blocks), optimizer=optimizer)
    outcome = train(engine, batches, rank)
    engine.destroy()
    return outcome.weights


def _compare(rank: int, world_size: int) -> int:
    calls = 0
    product = host_products._product

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        return product(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_products, "is_mkl_slow", lambda: False)
        wanted = _masters(rank, world_size, 0)
        patch.setattr(host_products, "is_mkl_slow", lambda: True)
        patch.setattr(host_products, "_LEAST_PRODUCTS", 1)
        patch.setattr(host_products, "_product", counted)
        for stage in range(4):
            # only the order of sums differs: some roundings of 6e-8 per step
            assert relative_difference(_masters(rank, world_size, stage), wanted) <= 1e-5, stage
    return calls


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")
def test_experts_train_alike_on_either_library() -> None:
    assert all(calls > 0 for calls in run_ranks(_compare, 2))
