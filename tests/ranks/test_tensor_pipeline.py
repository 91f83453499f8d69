"""Stages of a pipeline whose layers are cut over tensor-parallel ranks train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.sharding import Cut
from deepspeed.topology.grid import PipeModelDataParallelTopology
from tests.support.cut_net import cuts_of, part_of
from tests.support.engines import config, masters, zero
from tests.support.pipelines import Whole, layers, make_pipeline, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, train_reference

STEPS, CLIP = 6, 0.3
RULES = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r"widen\."], "partition_type": "column"},
        {"patterns": [r"narrow\."], "partition_type": "row"},
    ],
}


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _train(
    rank: int, world_size: int, stages: int, tensor: int, zero_stage: int, schedule: str
) -> tuple[list[float], dict[str, Tensor], dict[str, Cut], int]:
    data = world_size // stages // tensor
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    settings = config(
        2,
        2,
        **zero(zero_stage, reduce_bucket_size=100),
        gradient_clipping=CLIP,
        pipeline={"schedule": schedule},
        tensor_parallel={"autotp_size": tensor, "partition_config": RULES},
    )
    engine = make_pipeline(layers(4), stages, settings, optimizer=_sgd, num_stages=None, topology=topology)
    losses = train_pipeline(engine, token_batches(STEPS, 2, data))
    return losses, masters(engine), cuts_of(engine.module), engine.get_model_parallel_rank()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    ("stages", "tensor", "data", "zero_stage"), [(2, 2, 1, 0), (2, 2, 1, 1), (1, 2, 2, 1), (2, 2, 2, 1)]
)
def test_a_pipeline_of_parts_trains_as_one_process_does(
    stages: int, tensor: int, data: int, zero_stage: int, schedule: str
) -> None:
    reference = train_reference(Whole(layers(4)), _sgd, token_batches(STEPS, 2, data), clip=CLIP)
    seen = set()
    for losses, weights, cuts, place in run_ranks(_train, stages * tensor * data, stages, tensor, zero_stage, schedule):
        assert losses == pytest.approx(reference.losses, rel=FP64_ROUNDING)
        assert cuts
        for name, got in weights.items():
            want = reference.weights[name]
            torch.testing.assert_close(got, part_of(cuts[name], place, want) if name in cuts else want, rtol=0, atol=1e-11)
        seen |= weights.keys()
    assert seen == reference.weights.keys()
