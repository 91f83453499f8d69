"""Engines whose products run on oneDNN train as plain torch does, at every ZeRO stage, recomputed and in a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.activations import checkpointing
from deepspeed.ops import host_products
from deepspeed.pipe.module import PipelineModule
from tests.support.engines import Outcome, config, make_engine, train, zero
from tests.support.models import Batch, TinyModel, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import relative_difference, train_reference

WIDTH, ROWS, STEPS = 256, 64, 3  # products of 2^22: the least that are replaced
HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")

ROUNDING = 1e-5
"""Of fp32: sums of 256 products in another order, in three steps of Adam, which divides by small numbers near zero."""


RECOMPUTE = {
    "ours": checkpointing.checkpoint,
    "ours, reentrant": checkpointing.reentrant_checkpoint,
    "torch's": functools.partial(checkpoint, use_reentrant=False),
    "torch's, reentrant": functools.partial(checkpoint, use_reentrant=True),
}


class Wide(TinyModel):
    """Two products of a size that counts."""

    VALUES = WIDTH

    def __init__(self, recomputed: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recomputed = recomputed

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def batch(self, rows: int, seed: int) -> Batch:
        return self._regression(rows, torch.Generator().manual_seed(seed))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        checkpoint = RECOMPUTE.get(self.recomputed)
        hidden = self.hidden(inputs) if checkpoint is None else checkpoint(self.hidden, inputs)
        return F.mse_loss(self.second(hidden), targets)


def _wide(recomputed: str = "") -> Wide:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Wide(recomputed)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _counted() -> list[int]:
    """Let products be replaced, as where that pays, and count them."""
    host_products.is_mkl_slow = lambda: True  # type: ignore[assignment]  # this process ends with the test
    product, count = host_products._product, [0]

    def counting(*args: Any) -> Tensor:
        count[0] += 1
        return product(*args)

    host_products._product = counting  # type: ignore[assignment]
    return count


def _train(rank: int, world_size: int, stage: int, recomputed: str) -> tuple[Outcome, int]:
    count = _counted()
    model = _wide(recomputed)
    blocks = zero(stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    engine = make_engine(model, config(1, ROWS, **blocks), optimizer=_sgd(model.parameters()))
    return train(engine, make_batches(_wide(), STEPS, 1, world_size, ROWS), rank), count[0]


@pytest.mark.parametrize("recomputed", ["", *RECOMPUTE])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_plain_torch(stage: int, recomputed: str) -> None:
    reference = train_reference(_wide(), _sgd, make_batches(_wide(), STEPS, 1, 2, ROWS))
    for outcome, count in run_ranks(_train, 2, stage, recomputed):
        assert relative_difference(outcome.weights, reference.weights) < ROUNDING
        of_second = 3 * STEPS  # forward, and both products of backward
        of_first = {"": 3, "ours": 4, "ours, reentrant": 4, "torch's": 0, "torch's, reentrant": 1}[recomputed] * STEPS
        assert count == of_second + of_first


def _pipeline(rank: int, world_size: int, schedule: str) -> tuple[dict[str, Tensor], int]:
    count = _counted()
    whole = _wide()
    layers: list[Any] = [whole.first, torch.tanh, whole.second]
    module = PipelineModule(layers, num_stages=world_size, loss_fn=F.mse_loss, partition_method="uniform")
    settings = config(2, ROWS, pipeline={"schedule": schedule})
    engine = make_engine(module, settings, optimizer=_sgd(module.parameters()))
    batches = make_batches(_wide(), STEPS, 2, 1, ROWS)
    for step in batches:
        engine.train_batch(iter([micro[0] for micro in step]))
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}, count[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pipeline_trains_as_plain_torch(schedule: str) -> None:
    reference = train_reference(_wide(), _sgd, make_batches(_wide(), STEPS, 2, 1, ROWS))
    want = {name.replace("first", "0").replace("second", "2"): each for name, each in reference.weights.items()}
    found: dict[str, Tensor] = {}
    for weights, count in run_ranks(_pipeline, 2, schedule):
        found |= weights
        assert count
    assert relative_difference(found, want) < ROUNDING
