"""What was saved comes back: training after a resume goes on as if it had never stopped, on any number of ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError, CheckpointNotFoundError
from tests.support.engines import config, make_engine, masters, train, zero
from tests.support.models import Mlp, PartlyFrozen, TiedLm, WithEmptyParameter, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference

ROWS = 12  # global rows per step: 1, 2, 3 and 4 ranks divide it
SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 1e-2}}
OPTIMIZERS: dict[str, Any] = {
    "adam": functools.partial(torch.optim.AdamW, lr=1e-2),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def settings(kind: str, world_size: int, **blocks: Any) -> dict[str, Any]:
    precision = {} if kind in ("fp32", "fp64") else {kind: {"enabled": True}}
    return config(rows=ROWS // world_size, scheduler=SCHEDULE, **precision, **blocks)


def engine_for(
    model_class: Any, kind: str, optimizer: str, world_size: int, seed: int = 0, stage: int = 0
) -> DeepSpeedEngine:
    dtype = torch.float64 if kind == "fp64" else torch.float32
    model = build(model_class, dtype=dtype, seed=seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    blocks = zero(stage, **SMALL)
    return make_engine(model, settings(kind, world_size, **blocks), optimizer=OPTIMIZERS[optimizer](trained))


SMALL = {"reduce_bucket_size": 200, "stage3_param_persistence_threshold": 20}
"""Several buckets, and at stage 3 both kinds of parameters, although the models are tiny."""


def batches(engine: DeepSpeedEngine, world_size: int) -> list[list[list[tuple[Tensor, ...]]]]:
    """Six steps of ROWS rows each, split evenly among the ranks."""
    whole = make_batches(engine.module, 6, 1, 1, rows=ROWS)
    return [[[tuple(t.chunk(world_size)[r] for t in micro[0]) for r in range(world_size)] for micro in s] for s in whole]


def _save(rank: int, world_size: int, folder: str, model_class: Any, kind: str, optimizer: str, stage: int = 0) -> Any:
    engine = engine_for(model_class, kind, optimizer, world_size, stage=stage)
    data = batches(engine, world_size)
    train(engine, data[:3], rank)
    engine.save_checkpoint(folder, tag="here", client_state={"note": "hello", "numbers": [1, 2.5]})
    torch.manual_seed(99)
    return train(engine, data[3:], rank).weights, engine.get_lr()


def _load(rank: int, world_size: int, folder: str, model_class: Any, kind: str, optimizer: str, stage: int = 0) -> Any:
    engine = engine_for(model_class, kind, optimizer, world_size, seed=5, stage=stage)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None
    assert Path(path).name == "here"
    assert client_state == {"note": "hello", "numbers": [1, 2.5]}
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3, 3 * ROWS)
    outcome = train(engine, batches(engine, world_size)[3:], rank)
    return outcome.weights, engine.get_lr(), outcome.model_weights


@pytest.mark.parametrize(
    ("model_class", "kind", "optimizer"),
    [
        (Mlp, "fp64", "adam"),
        (Mlp, "fp64", "adagrad"),
        (TiedLm, "fp64", "sgd"),
        (PartlyFrozen, "fp64", "adam"),
        (WithEmptyParameter, "fp64", "adam"),
    ],
)
@pytest.mark.parametrize("resumed_on", [1, 2, 3])
def test_a_run_of_two_ranks_goes_on_anywhere(
    tmp_path: Path, model_class: Any, kind: str, optimizer: str, resumed_on: int
) -> None:
    wanted, rates = run_ranks(_save, 2, str(tmp_path), model_class, kind, optimizer)[0]
    for weights, resumed_rates, _ in run_ranks(_load, resumed_on, str(tmp_path), model_class, kind, optimizer):
        assert relative_difference(weights, wanted) <= FP64_ROUNDING
        assert resumed_rates == rates


@pytest.mark.parametrize("model_class", [Mlp, TiedLm, WithEmptyParameter])
@pytest.mark.parametrize(
    ("saved_at", "saved_on", "resumed_at", "resumed_on"),
    [(1, 2, 1, 3), (2, 3, 2, 2), (2, 2, 0, 1), (0, 1, 2, 3), (1, 3, 3, 2), (3, 2, 1, 3), (3, 3, 3, 2), (3, 2, 0, 1)],
)
def test_a_run_goes_on_at_another_zero_stage_on_other_ranks(
    tmp_path: Path, model_class: Any, saved_at: int, saved_on: int, resumed_at: int, resumed_on: int
) -> None:
    what = (str(tmp_path), model_class, "fp64", "adam")
    wanted, rates = run_ranks(_save, saved_on, *what, saved_at)[0]
    for weights, resumed_rates, _ in run_ranks(_load, resumed_on, *what, resumed_at):
        assert relative_difference(weights, wanted) <= FP64_ROUNDING
        assert resumed_rates == rates


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_the_same_ranks_go_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    wanted, rates = run_ranks(_save_in, 2, str(tmp_path), kind, dtype)[0]
    weights, resumed_rates = run_ranks(_load_in, 2, str(tmp_path), kind, dtype)[0]
    assert relative_difference(weights, wanted) == 0.0
    assert resumed_rates == rates


def _cast(data: Any, dtype: torch.dtype | None) -> Any:
    return [[[tuple(t.to(dtype) if dtype else t for t in b) for b in micro] for micro in step] for step in data]


def _save_in(rank: int, world_size: int, folder: str, kind: str, dtype: torch.dtype | None) -> Any:
    engine = engine_for(Mlp, kind, "adam", world_size)
    data = _cast(make_batches(build(Mlp), 6, 1, world_size), dtype)
    train(engine, data[:3], rank)
    engine.save_checkpoint(folder)
    return train(engine, data[3:], rank).weights, engine.get_lr()


def _load_in(rank: int, world_size: int, folder: str, kind: str, dtype: torch.dtype | None) -> Any:
    engine = engine_for(Mlp, kind, "adam", world_size, seed=3)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    assert Path(path).name == "global_step3"
    data = _cast(make_batches(build(Mlp), 6, 1, world_size), dtype)
    return train(engine, data[3:], rank).weights, engine.get_lr()


def _precision_change(rank: int, world_size: int, folder: str) -> None:
    first = engine_for(Mlp, "bf16", "adam", world_size)
    train(first, _cast(make_batches(build(Mlp), 2, 1, world_size), torch.bfloat16), rank)
    first.save_checkpoint(folder)
    second = engine_for(Mlp, "fp32", "adam", world_size, seed=4)
    second.load_checkpoint(folder)
    assert relative_difference(masters(second), masters(first)) == 0.0
    third = engine_for(Mlp, "bf16", "adam", world_size, seed=6)
    second.save_checkpoint(folder, tag="full")
    third.load_checkpoint(folder)
    assert relative_difference(masters(third), masters(first)) == 0.0
    for name, p in third.module.named_parameters():
        assert torch.equal(p, masters(third)[name].bfloat16())


def test_precision_may_change_both_ways(tmp_path: Path) -> None:
    run_ranks(_precision_change, 2, str(tmp_path))


def _partial_loads(rank: int, world_size: int, folder: str) -> None:
    saved = engine_for(Mlp, "fp64", "adam", world_size)
    train(saved, batches(saved, world_size)[:2], rank)
    saved.save_checkpoint(folder)

    only_module = engine_for(Mlp, "fp64", "adam", world_size, seed=1)
    only_module.load_checkpoint(folder, load_module_only=True)
    assert relative_difference(masters(only_module), masters(saved)) == 0.0
    assert only_module.global_steps == 0
    assert not only_module.optimizer.state  # type: ignore[union-attr]

    no_moments = engine_for(Mlp, "fp64", "adam", world_size, seed=1)
    no_moments.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert no_moments.global_steps == 2
    assert not no_moments.optimizer.state  # type: ignore[union-attr]
    assert no_moments.get_lr() != saved.get_lr()

    other = engine_for(TiedLm, "fp64", "adam", world_size)
    before = masters(other)
    with pytest.raises(CheckpointError, match=r"(?s)embedding\.weight.*load_module_strict=False"):
        other.load_checkpoint(folder)
    assert relative_difference(masters(other), before) == 0.0

    with pytest.raises(CheckpointNotFoundError, match="global_step2"):
        saved.load_checkpoint(folder, tag="no such")
    assert saved.load_checkpoint(folder + "/nowhere") == (None, None)

    given: dict[str, Any] = {}
    saved.load_checkpoint(folder, custom_load_fn=lambda src, dst: given.update(src=src, dst=dst))
    assert set(given["src"]) == set(saved.module.state_dict())
    assert given["dst"] is saved.module


def test_parts_can_be_left_out_and_misfits_are_named(tmp_path: Path) -> None:
    run_ranks(_partial_loads, 2, str(tmp_path))


def _frozen_left_out(rank: int, world_size: int, folder: str) -> None:
    saved = engine_for(PartlyFrozen, "fp64", "adam", world_size)
    saved.save_checkpoint(folder, exclude_frozen_parameters=True)
    loaded = engine_for(PartlyFrozen, "fp64", "adam", world_size, seed=8)
    frozen = {n: p.detach().clone() for n, p in loaded.module.first.named_parameters()}
    loaded.load_checkpoint(folder)
    assert relative_difference(masters(loaded), masters(saved)) == 0.0
    assert relative_difference({n: p.detach() for n, p in loaded.module.first.named_parameters()}, frozen) == 0.0


def test_frozen_parameters_may_be_left_out_of_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(_frozen_left_out, 2, str(tmp_path))
