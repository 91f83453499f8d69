"""An engine over sequence-parallel ranks: gradients are averaged over them too, the batch counts data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import ArgumentError
from deepspeed.utils import groups
from tests.support.cut_net import cut_net
from tests.support.engines import Outcome, config, make_engine, train, zero
from tests.support.models import make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STEPS = 4
ROWS = 3


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def _engine(settings: dict[str, Any], **arguments: Any) -> DeepSpeedEngine:
    model = cut_net()
    return make_engine(model, settings, optimizer=_adam(model.parameters()), **arguments)


def _train_sequences(rank: int, world_size: int, stage: int, given: str) -> tuple[Outcome, tuple[int, ...]]:
    settings = config(2, ROWS, **zero(stage))
    arguments: dict[str, Any] = {}
    if given == "mesh_param":
        arguments["mesh_param"] = (world_size // 2, 2)
    else:
        settings |= {"sequence_parallel_size": 2, "data_parallel_size": world_size // 2}
    engine = _engine(settings, **arguments)
    outcome = train(engine, make_batches(cut_net(), STEPS, 2, world_size, ROWS), rank)
    sizes = (engine.train_batch_size(), engine.dp_world_size, engine.seq_dp_world_size)
    ranks = (groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank())
    return outcome, (*sizes, *ranks)


@pytest.mark.parametrize("given", ["keys", "mesh_param"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_ranks_train_as_the_whole_does(world_size: int, stage: int, given: str) -> None:
    batches = make_batches(cut_net(), STEPS, 2, world_size, ROWS)  # a sequence rank's tokens are a batch of their own here
    reference = train_reference(cut_net(), _adam, batches, averages_each_micro_batch=stage >= 2)
    for rank, (outcome, sizes) in enumerate(run_ranks(_train_sequences, world_size, stage, given)):
        assert outcome.norms == pytest.approx(reference.norms, rel=FP64_ROUNDING)
        assert relative_difference(outcome.weights, reference.weights) < FP64_ROUNDING
        data = world_size // 2
        assert sizes == (ROWS * 2 * data, data, world_size, 2, rank % 2)


def _communication(rank: int, world_size: int, key: str | None) -> torch.dtype:
    settings = config(1, ROWS, bf16={"enabled": True}, sequence_parallel_size=2)
    if key is not None:
        settings["seq_parallel_communication_data_type"] = key
    model = cut_net(torch.float32)
    return make_engine(model, settings, optimizer=_adam(model.parameters())).communication_data_type


@pytest.mark.parametrize(("key", "expected"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_travel_in_the_dtype_that_is_told_for_sequences(key: str | None, expected: torch.dtype) -> None:
    assert run_ranks(_communication, 2, key) == [expected, expected]


def _refused(rank: int, world_size: int, settings: dict[str, Any], mesh_param: tuple[int, ...] | None) -> str:
    with pytest.raises(ArgumentError) as refused:
        _engine(config(1, ROWS, **settings), mesh_param=mesh_param)
    return str(refused.value)


@pytest.mark.parametrize(
    ("settings", "mesh_param", "said"),
    [
        ({"sequence_parallel_size": 3}, None, "sequence=3"),
        ({}, (2, 2), "leave 1 data-parallel"),
        ({}, (2,), "needed two numbers"),
        ({"sequence_parallel_size": 2}, (2, 1), "mean the same"),
    ],
)
def test_sizes_that_do_not_multiply_out_are_refused(
    settings: dict[str, Any], mesh_param: tuple[int, ...] | None, said: str
) -> None:
    assert all(said in text for text in run_ranks(_refused, 2, settings, mesh_param))


def test_the_batch_counts_data_parallel_ranks_alone() -> None:
    parsed = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2}, world_size=4)
    assert parsed.train_batch_size == 4
