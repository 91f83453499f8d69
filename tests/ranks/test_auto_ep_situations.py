"""Spread decoders where models are built, marked, recomputed or copied in other ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import ArgumentError, UnbuiltFeatureError, UsageError
from deepspeed.pipe import PipelineModule
from deepspeed.utils import set_z3_leaf_modules
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import Batches, make_batches
from tests.support.moe_decoders import MoeDecoder, moe_decoder
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

KIND, STEPS, ROWS, CLIP = "mixtral", 3, 2, 0.05
TORCH_STEPS = {"zero_force_ds_cpu_optimizer": False}


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def _settings(ep_size: int, stage: int, **blocks: Any) -> dict[str, Any]:
    expert_parallel = {"enabled": True, "autoep_size": ep_size}
    return config(1, ROWS, expert_parallel=expert_parallel, gradient_clipping=CLIP, **zero(stage), **blocks)


def _engine(model: nn.Module, ep_size: int, stage: int, **blocks: Any) -> DeepSpeedEngine:
    return make_engine(model, _settings(ep_size, stage, **blocks), optimizer=_optimizer(model.parameters()))


def _batches(world_size: int) -> Batches:
    return make_batches(moe_decoder(KIND), STEPS, 1, world_size, ROWS)


def _reference(world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    outcome = train_reference(moe_decoder(KIND), _optimizer, _batches(world_size), clip=CLIP, unused_counts_as_zero=True)
    return outcome.norms, outcome.weights


def _joined(of_ranks: list[dict[str, Tensor]], ranks: range) -> dict[str, Tensor]:
    """Experts of `ranks` one behind the other."""
    return {
        name: torch.cat([of_ranks[rank][name] for rank in ranks]) if ".mlp.experts." in name else value
        for name, value in of_ranks[0].items()
    }


def _trained(rank: int, world_size: int, situation: str) -> tuple[list[float], dict[str, Tensor]]:
    model = moe_decoder(KIND)
    blocks: dict[str, Any] = {}
    if situation == "leaf blocks":
        (block,) = {type(layer.mlp) for layer in model.decoder.model.layers}
        assert len(set_z3_leaf_modules(model, [block])) == len(model.decoder.model.layers)
    elif situation == "leaf experts by name":
        blocks["zero_optimization"] = zero(3)["zero_optimization"] | {"leaf_module": {"classes": ["MixtralExperts"]}}
    elif situation == "recomputed":
        model.decoder.gradient_checkpointing_enable()
        model.train()
    elif situation == "data first":
        blocks["use_data_before_expert_parallelism"] = True
    elif situation == "optimizer in host memory":
        blocks = zero(2, offload_optimizer={"device": "cpu"}) | TORCH_STEPS
    elif situation == "leaf experts, parameters in host memory":
        blocks = zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}) | TORCH_STEPS
    elif situation == "copied":
        engine = _engine(model, 2, 1)
        model = copy.deepcopy(engine.module)
        engine.destroy()
    stage = 3 if situation.startswith("leaf") else 2
    settings = _settings(2, stage) | blocks
    outcome = train(make_engine(model, settings, optimizer=_optimizer(model.parameters())), _batches(world_size), rank)
    return outcome.norms, outcome.weights


@pytest.mark.parametrize(
    ("situation", "world_size", "ranks"),
    [
        ("leaf blocks", 2, range(2)),
        ("leaf experts by name", 2, range(2)),
        ("recomputed", 2, range(2)),
        ("copied", 2, range(2)),
        ("optimizer in host memory", 2, range(2)),
        ("leaf experts, parameters in host memory", 2, range(2)),
        ("data first", 4, range(0, 4, 2)),
    ],
)
def test_numbers_are_those_of_one_process(situation: str, world_size: int, ranks: range) -> None:
    found = run_ranks(_trained, world_size, situation, timeout_seconds=90)
    norms, weights = _reference(world_size)
    assert found[0][0] == pytest.approx(norms, rel=FP64_ROUNDING)
    assert relative_difference(_joined([each[1] for each in found], ranks), weights) <= FP64_ROUNDING


def _alone_from_the_start(rank: int, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    with deepspeed.zero.Init(dtype=torch.float64, config_dict_or_path=config(1, ROWS, **zero(3))):
        model = MoeDecoder(KIND)
    plain = moe_decoder(KIND)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            param.data.copy_(value)
    outcome = train(_engine(model, 1, 3), _batches(world_size), rank)
    return outcome.norms, outcome.weights


def test_a_model_made_under_zero_init_trains_with_all_experts_on_every_rank() -> None:
    found = run_ranks(_alone_from_the_start, 2, timeout_seconds=90)
    norms, weights = _reference(2)
    assert found[0][0] == pytest.approx(norms, rel=FP64_ROUNDING)
    assert relative_difference(found[0][1], weights) <= FP64_ROUNDING


def _refused(rank: int, world_size: int) -> list[str]:
    texts = []
    with deepspeed.zero.Init(dtype=torch.float64, config_dict_or_path=config(1, ROWS, **zero(3))):
        sharded = MoeDecoder(KIND)
    with pytest.raises(UsageError) as of_sharded:
        _engine(sharded, world_size, 3)
    texts.append(str(of_sharded.value))
    pipeline = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=1, loss_fn=nn.MSELoss())
    with pytest.raises(UnbuiltFeatureError) as of_pipeline:
        _engine(pipeline, world_size, 1)
    texts.append(str(of_pipeline.value))
    with pytest.raises(ArgumentError) as of_size:
        _engine(moe_decoder(KIND), 4, 1)
    texts.append(str(of_size.value))
    return texts


def test_what_does_not_work_is_refused_on_all_ranks_with_the_cure() -> None:
    for texts in run_ranks(_refused, 2, timeout_seconds=90):
        sharded, pipeline, size = texts
        assert "zero.Init" in sharded
        assert "outside" in sharded
        assert "PipelineModule" in pipeline
        assert "4" in size


def _trained_in_16_bits(rank: int, world_size: int, dtype: str, stage: int) -> list[float]:
    model = moe_decoder(KIND, torch.float32)
    settings = _settings(2, stage, **{dtype: {"enabled": True}})
    engine = make_engine(model, settings, optimizer=_optimizer(model.parameters()))
    batch = make_batches(model, 1, 1, world_size, ROWS)[0][0][rank]
    losses = []
    for _ in range(12):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 3), ("fp16", 2)])
def test_16_bit_decoders_learn_a_batch_by_heart(dtype: str, stage: int) -> None:
    for losses in run_ranks(_trained_in_16_bits, 2, dtype, stage, timeout_seconds=90):
        assert losses[-1] < 0.8 * losses[0]
