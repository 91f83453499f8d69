"""What Accelerate saves, loads, gathers and takes out of an engine of ours, over two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.accelerate_runs import (
    Recipe,
    assert_same_weights,
    build_accelerator,
    fits,
    loader,
    prepared,
    trained,
    weights,
)
from tests.support.clients import assert_same_curve, tiny_llama, whole_weights
from tests.support.ranks import run_ranks

HALF, ROWS = 2, 32
"""Micro-batches before the state is saved, of four that a rank has."""


def zero(stage: int, scheduler: Any = "torch", **settings: Any) -> Recipe:
    return Recipe(plugin={"zero_stage": stage, "zero3_save_16bit_model": True}, scheduler=scheduler, **settings)


def with_warmup(stage: int) -> Recipe:
    """Optimizer and schedule out of the config: the schedule rests in our checkpoint, not in Accelerate's file."""
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    config = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    return Recipe(plugin={"hf_ds_config": config}, optimizer="dummy", scheduler="warmup")


def _id(recipe: Recipe) -> str:
    kind = "config" if recipe.optimizer == "dummy" else "fields"
    assert recipe.plugin is not None
    stage = recipe.plugin.get("zero_stage")
    return f"{kind}-{recipe.plugin['hf_ds_config']['zero_optimization']['stage'] if stage is None else stage}"


def _saves_halfway(rank: int, world_size: int, recipe: Recipe, folder: Path) -> dict[str, Any]:
    accelerator = build_accelerator(recipe)
    model, optimizer, batches, scheduler = prepared(accelerator, recipe)
    every = list(batches)
    fits(accelerator, model, optimizer, every[:HALF], scheduler)
    accelerator.save_state(str(folder))
    rest = fits(accelerator, model, optimizer, every[HALF:], scheduler)
    return {**rest, "weights": weights(accelerator, model)}


def _resumes(rank: int, world_size: int, recipe: Recipe, folder: Path) -> dict[str, Any]:
    accelerator = build_accelerator(recipe)
    model, optimizer, batches, scheduler = prepared(accelerator, recipe)
    accelerator.load_state(str(folder))
    rest = fits(accelerator, model, optimizer, accelerator.skip_first_batches(batches, HALF), scheduler)
    return {**rest, "weights": weights(accelerator, model)}


@pytest.mark.parametrize("recipe", [zero(0), zero(1), zero(2), zero(3), with_warmup(2), with_warmup(3)], ids=_id)
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_as_if_uninterrupted(recipe: Recipe, tmp_path: Path) -> None:
    expected = run_ranks(_saves_halfway, 2, recipe, tmp_path, init=False)
    got = run_ranks(_resumes, 2, recipe, tmp_path, init=False)
    for ours, whole in zip(got, expected, strict=True):
        assert (ours["losses"], ours["norms"], ours["rates"]) == (whole["losses"], whole["norms"], whole["rates"])
        assert_same_weights(ours["weights"], whole["weights"])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 0)])
def test_a_run_goes_on_at_another_stage(before: int, after: int, tmp_path: Path) -> None:
    expected = run_ranks(_saves_halfway, 2, zero(before), tmp_path, init=False)
    for ours, whole in zip(run_ranks(_resumes, 2, zero(after), tmp_path, init=False), expected, strict=True):
        assert_same_curve(ours["losses"], whole["losses"])
        assert ours["rates"] == whole["rates"]
        assert_same_weights(ours["weights"], whole["weights"], 1e-4)  # as of two runs under DDP


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_of_two_ranks_goes_on_on_one(stage: int, tmp_path: Path) -> None:
    expected = run_ranks(_saves_halfway, 2, zero(stage, "none"), tmp_path, init=False)
    alone = replace(zero(stage, "none"), batch_rows=8)
    (got,) = run_ranks(_resumes, 1, alone, tmp_path, init=False)
    both = [sum(pair) / 2 for pair in zip(*(each["losses"] for each in expected), strict=True)]  # rows of equal length
    assert_same_curve(got["losses"], both)
    for of_rank in expected:
        assert got["norms"] == pytest.approx(of_rank["norms"], rel=1e-4)
        assert_same_weights(got["weights"], of_rank["weights"], 1e-4)


def _taken_out(rank: int, world_size: int, stage: int, folder: Path) -> None:
    recipe = zero(stage, "none")
    accelerator = build_accelerator(recipe)
    given = tiny_llama()
    start = {name: value.detach().clone() for name, value in given.named_parameters()}
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    model, optimizer, _ = accelerator.prepare(given, optimizer, loader(recipe))
    assert accelerator.unwrap_model(model) is given
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, str(folder))
    accelerator.unwrap_model(model).save_pretrained(
        folder / "pretrained", is_main_process=rank == 0, state_dict=None if state is None else dict(state)
    )
    accelerator.wait_for_everyone()
    assert (state is None) is (stage == 3 and rank > 0)
    files = (folder / "model.safetensors", folder / "pretrained" / "model.safetensors")
    for tensors in (*([] if state is None else [state]), *map(load_file, files), whole_weights(given)):
        assert all(torch.equal(tensors[name], value) for name, value in start.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_model_and_its_whole_weights_come_out_as_they_went_in(stage: int, tmp_path: Path) -> None:
    run_ranks(_taken_out, 2, stage, tmp_path, init=False)


def _predicts(rank: int, world_size: int, recipe: Recipe) -> torch.Tensor:
    accelerator = build_accelerator(recipe)
    model, optimizer, batches, _ = prepared(accelerator, recipe)
    fits(accelerator, model, optimizer, batches)
    model.eval()
    found = []
    with torch.no_grad():
        for batch in batches:
            found.append(accelerator.gather_for_metrics(model(**batch).logits[:, -1].float()))
    return torch.cat(found)


@pytest.mark.parametrize("stage", [0, 3])
def test_predictions_gathered_for_metrics_are_those_of_ddp_each_row_once(stage: int) -> None:
    recipe = zero(stage, "none", rows=ROWS - 3)
    got, expected = (run_ranks(_predicts, 2, each, init=False) for each in (recipe, recipe.reference()))
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape[0] == ROWS - 3
        assert torch.equal(ours, got[0])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def _trains_twice(rank: int, world_size: int, recipe: Recipe) -> list[dict[str, Any]]:
    accelerator = build_accelerator(recipe)
    found = []
    for _ in range(2):
        model, optimizer, batches, scheduler = prepared(accelerator, recipe)
        found.append(fits(accelerator, model, optimizer, batches, scheduler))
        model, optimizer, batches, scheduler = accelerator.free_memory(model, optimizer, batches, scheduler)
        assert model is None
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_memory_freed_serves_the_next_model(stage: int) -> None:
    for first, second in run_ranks(_trains_twice, 2, zero(stage), init=False):
        assert first == second
        assert first["losses"][-1] < first["losses"][0]


def test_losses_of_a_run_that_saves_are_those_of_one_that_does_not(tmp_path: Path) -> None:
    saving = run_ranks(_saves_halfway, 2, zero(3), tmp_path, init=False)
    whole = run_ranks(trained, 2, zero(3), init=False)
    for each, other in zip(saving, whole, strict=True):
        assert each["losses"] == other["losses"][HALF:]
        assert_same_weights(each["weights"], other["weights"])
