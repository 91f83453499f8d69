"""What was saved comes back: training after a resume goes on as if it had never stopped, on any number of ranks."""

from __future__ import annotations

import functools
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError, CheckpointNotFoundError
from tests.support.engines import config, make_engine, masters, model_weights, moments, train, zero
from tests.support.models import Branching, Mlp, PartlyFrozen, TiedLm, WithEmptyParameter, build, make_batches
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


STAGES = (0, 1, 2, 3)


def _partial_loads(rank: int, world_size: int, folder: str) -> None:
    for stage in STAGES:
        where = f"{folder}/{stage}"
        saved = engine_for(Mlp, "fp64", "adam", world_size, stage=stage)
        train(saved, batches(saved, world_size)[:2], rank)
        saved.save_checkpoint(where)
        whole = masters(saved)

        only_module = engine_for(Mlp, "fp64", "adam", world_size, seed=1, stage=stage)
        rate, drawn = only_module.get_lr(), torch.get_rng_state()
        only_module.load_checkpoint(where, load_module_only=True)
        assert relative_difference(masters(only_module), whole) == 0.0, stage
        assert (only_module.global_steps, only_module.get_lr()) == (0, rate), stage
        assert torch.equal(torch.get_rng_state(), drawn), stage
        assert not moments(only_module), stage

        no_moments = engine_for(Mlp, "fp64", "adam", world_size, seed=1, stage=stage)
        no_moments.load_checkpoint(where, load_optimizer_states=False)
        assert (no_moments.global_steps, no_moments.get_lr()) == (2, saved.get_lr()), stage
        assert relative_difference(masters(no_moments), whole) == 0.0, stage
        assert not moments(no_moments), stage

        no_schedule = engine_for(Mlp, "fp64", "adam", world_size, seed=1, stage=stage)
        no_schedule.load_checkpoint(where, load_lr_scheduler_states=False)
        assert no_schedule.lr_scheduler.state_dict() != saved.lr_scheduler.state_dict(), stage
        wanted = moments(saved)
        for name, state in moments(no_schedule).items():
            assert relative_difference(state, wanted[name]) == 0.0, (stage, name)
        assert moments(no_schedule).keys() == wanted.keys(), stage
        for engine in (saved, only_module, no_moments, no_schedule):
            engine.destroy()


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    run_ranks(_partial_loads, 2, str(tmp_path), timeout_seconds=120)


def _misfits(rank: int, world_size: int, folder: str) -> None:
    for stage in STAGES:
        where = f"{folder}/{stage}"
        saved = engine_for(Mlp, "fp64", "adam", world_size, stage=stage)
        saved.save_checkpoint(where)
        whole = masters(saved)

        other = engine_for(TiedLm, "fp64", "adam", world_size, stage=stage)
        before = masters(other)
        with pytest.raises(CheckpointError, match=r"(?s)embedding\.weight.*load_module_strict=False"):
            other.load_checkpoint(where)
        assert relative_difference(masters(other), before) == 0.0, stage

        more = engine_for(Branching, "fp64", "adam", world_size, seed=4, stage=stage)
        before = masters(more)
        with pytest.raises(CheckpointError, match=r"lacks 'branch\.bias', 'branch\.weight'"):
            more.load_checkpoint(where)
        more.load_checkpoint(where, load_module_strict=False, load_module_only=True)
        after = masters(more)
        assert relative_difference({name: after[name] for name in whole}, whole) == 0.0, stage
        branch = {name: value for name, value in after.items() if name not in whole}
        assert relative_difference(branch, {name: before[name] for name in branch}) == 0.0, stage

        with pytest.raises(CheckpointNotFoundError, match="global_step0"):
            saved.load_checkpoint(where, tag="no such")
        assert saved.load_checkpoint(where + "/nowhere") == (None, None)

        target = engine_for(Mlp, "fp64", "adam", world_size, seed=6, stage=stage)
        given: list[Any] = []

        def copy_first(src: dict[str, Tensor], dst: Any) -> None:
            given.append((set(src), dst))  # noqa: B023 - called before the loop goes on
            dst.load_state_dict({name: value for name, value in src.items() if name.startswith("first")}, strict=False)

        before = masters(target)
        target.load_checkpoint(where, custom_load_fn=copy_first)
        assert given == [(set(saved.module.state_dict()), target.module)], stage
        wanted = {name: (whole if name.startswith("first") else before)[name] for name in whole}
        assert relative_difference(masters(target), wanted) == 0.0, stage
        assert relative_difference(model_weights(target), wanted) == 0.0, stage
        for engine in (saved, other, more, target):
            engine.destroy()


def test_misfits_are_named_and_load_in_part_or_by_the_callers_function(tmp_path: Path) -> None:
    run_ranks(_misfits, 2, str(tmp_path), timeout_seconds=120)


def _frozen_left_out(rank: int, world_size: int, folder: str) -> None:
    for stage in STAGES:
        saved = engine_for(PartlyFrozen, "fp64", "adam", world_size, stage=stage)
        saved.save_checkpoint(f"{folder}/{stage}", exclude_frozen_parameters=True)
        loaded = engine_for(PartlyFrozen, "fp64", "adam", world_size, seed=8, stage=stage)
        before, trained = model_weights(loaded), masters(saved)
        loaded.load_checkpoint(f"{folder}/{stage}")
        assert relative_difference(model_weights(loaded), {**before, **trained}) == 0.0, stage
        assert before.keys() - trained.keys() == {"first.weight", "first.bias"}
        for engine in (saved, loaded):
            engine.destroy()


def test_frozen_parameters_may_be_left_out_of_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(_frozen_left_out, 2, str(tmp_path), timeout_seconds=120)


def _different_tags(rank: int, world_size: int, folder: str) -> None:
    """Every rank has a tag of its own."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)
    for stage, mode in itertools.product(STAGES, ("Ignore", "Warn", "Fail")):
        where = Path(folder, f"{stage}{mode}")
        model = build(Mlp, dtype=torch.float64)
        blocks = zero(stage, **SMALL)
        engine = make_engine(
            model,
            settings("fp64", world_size, checkpoint={"tag_validation": mode}, **blocks),
            optimizer=OPTIMIZERS["adam"](model.parameters()),
        )
        said.clear()
        if mode == "Fail":
            with pytest.raises(CheckpointError, match="'step0' on rank 0; 'step1' on rank 1"):
                engine.save_checkpoint(str(where), tag=f"step{rank}")
            assert not where.exists()
        else:
            engine.save_checkpoint(str(where), tag=f"step{rank}", save_latest=False)
            assert bool([text for text in said if "different tags" in text]) == (mode == "Warn" and rank == 0)
            assert engine.load_checkpoint(str(where)) == (None, None)  # there is no `latest`
            assert any("no file 'latest'" in text for text in said) or rank
            assert engine.load_checkpoint(str(where), tag="step0")[0] == str(where / "step0")
        engine.destroy()


def test_ranks_that_save_under_different_tags_are_treated_as_the_config_says(tmp_path: Path) -> None:
    run_ranks(_different_tags, 2, str(tmp_path), timeout_seconds=120)
