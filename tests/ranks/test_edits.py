"""What a user does to whole weights between two updates counts once, on every rank, at every ZeRO stage below 3."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.comm import shared_shards
from tests.support.engines import config, make_engine, masters, model_weights, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference

ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
SEVERAL_BUCKETS = {"reduce_bucket_size": 100}


def _edit(model: Mlp, step: int) -> None:
    """Another kind of edit after each step; the first, third and fourth depend on what is there."""
    weight = model.first.weight
    with torch.no_grad():
        if step == 0:
            weight.mul_(0.5)
        elif step == 1:
            model.load_state_dict({name: torch.full_like(p, 0.1) for name, p in model.state_dict().items()})
        elif step == 2:
            weight.data = weight.detach().clone() * 2
        else:
            weight[1].add_(torch.arange(float(weight.shape[1])) / 8)


def _train(rank: int, world_size: int, stage: int, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}[kind]
    model = build(Mlp, dtype=torch.float64 if kind == "fp64" else torch.float32)
    blocks: dict[str, Any] = {"bf16": {"enabled": True}} if kind == "bf16" else {}
    engine = make_engine(model, config(**blocks, **zero(stage, **SEVERAL_BUCKETS)), optimizer=ADAM(model.parameters()))
    for step, micros in enumerate(make_batches(model, 5, 1, world_size)):
        engine.backward(engine(*(t.to(dtype) for t in micros[0][rank])))
        engine.step()
        _edit(model, step)
    weights = model_weights(engine)
    engine.backward(engine(*(t.to(dtype) for t in micros[0][rank])))
    engine.step()
    return weights, masters(engine)


@pytest.mark.parametrize("kind", ["fp64", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_edits_between_updates_count_as_at_stage_0(stage: int, kind: str, world_size: int) -> None:
    wanted_weights, wanted_masters = run_ranks(_train, world_size, 0, kind)[0]
    for weights, of_optimizer in run_ranks(_train, world_size, stage, kind):
        assert relative_difference(weights, wanted_weights) <= FP64_ROUNDING
        assert relative_difference(of_optimizer, wanted_masters) <= FP64_ROUNDING


def _edit_early(rank: int, world_size: int, folder: str, stage: int) -> dict[str, Tensor]:
    model = build(Mlp)
    engine = make_engine(model, config(**zero(stage)), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    is_edited = Path(folder, "edited")
    if rank == 1:
        plain = shared_shards.SharedMemoryGatherer._copy

        def late(*arguments: Any) -> None:
            limit = time.monotonic() + 0.3  # the others must not get so far: then this is how long the test takes
            while not is_edited.exists() and time.monotonic() < limit:
                time.sleep(0.01)
            plain(*arguments)

        shared_shards.SharedMemoryGatherer._copy = late  # type: ignore[method-assign]
    engine.backward(engine(*make_batches(model, 1, 1, world_size)[0][0][rank]))
    engine.step()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    if rank == 0:
        is_edited.touch()
    return model_weights(engine)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_edits_early_does_not_edit_what_others_still_read(tmp_path: Path, stage: int) -> None:
    wanted = {name: p.detach() * 0.5 for name, p in build(Mlp).named_parameters()}
    for weights in run_ranks(_edit_early, 2, str(tmp_path), stage):
        assert relative_difference(weights, wanted) == 0.0


TIERED = [(stage, kind, "none") for stage in (0, 1, 2) for kind in ("fp32", "bf16")]
TIERED += [(stage, kind, "nvme") for stage in (1, 2) for kind in ("fp32", "bf16")]


def _edit_and_save(rank: int, world_size: int, folder: str) -> None:
    for stage, kind, tier in TIERED:
        blocks: dict[str, Any] = {"bf16": {"enabled": True}} if kind == "bf16" else {}
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        offload = {"device": tier, "nvme_path": folder}
        settings = config(**blocks, **zero(stage, **SEVERAL_BUCKETS, offload_optimizer=offload))
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
        model = build(Mlp)
        engine = make_engine(model, settings)
        (micros,) = make_batches(build(Mlp), 1, 1, world_size)
        engine.backward(engine(*(t.to(dtype) for t in micros[0][rank])))
        engine.step()
        _edit(model, 3)
        wanted = model_weights(engine)
        engine.save_checkpoint(folder, tag="edited")
        engine.destroy()
        resumed = make_engine(build(Mlp), settings)
        resumed.load_checkpoint(folder, tag="edited")
        got = model_weights(resumed)
        resumed.destroy()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted), (stage, kind, tier)


def test_a_checkpoint_holds_what_was_edited_just_before_it(tmp_path: Path) -> None:
    run_ranks(_edit_and_save, 2, str(tmp_path))
