"""A step that overflows in fp16: Accelerate says on every rank that it was skipped; training goes on as if it never was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.accelerate_runs import Recipe, build_accelerator, prepared
from tests.support.clients import assert_same_curve
from tests.support.ranks import run_ranks

BROKEN = 1
"""The batch whose loss is infinite on rank 1, of four."""


def _recipe(stage: int) -> Recipe:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {
        **dict.fromkeys(keys, "auto"),
        "fp16": {"enabled": "auto", "initial_scale_power": 4, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
    }
    return Recipe(plugin={"hf_ds_config": config}, mixed_precision="fp16", scheduler="torch")


def _trains(rank: int, world_size: int, stage: int, is_left_out: bool) -> dict[str, list[Any]]:
    recipe = _recipe(stage)
    accelerator = build_accelerator(recipe)
    model, optimizer, batches, scheduler = prepared(accelerator, recipe)
    seen: dict[str, list[Any]] = {"losses": [], "skipped": [], "rates": [], "scales": []}
    for number, batch in enumerate(batches):
        if is_left_out and number == BROKEN:
            continue
        loss = model(**batch).loss
        accelerator.backward(loss * (float("inf") if (rank, number) == (1, BROKEN) else 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen["losses"].append(loss.item())
        seen["skipped"].append((optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped))
        seen["rates"].append(scheduler.get_last_lr()[0])
        seen["scales"].append(model.optimizer.cur_scale)
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_is_known_to_accelerate_and_leaves_no_trace(stage: int) -> None:
    without = run_ranks(_trains, 2, stage, True, init=False)
    for got, expected in zip(run_ranks(_trains, 2, stage, False, init=False), without, strict=True):
        assert got["skipped"] == [(number == BROKEN,) * 2 for number in range(4)]
        assert expected["skipped"] == [(False, False)] * 3
        assert got["scales"] == [16.0, 8.0, 8.0, 8.0]
        assert got["rates"][BROKEN] == got["rates"][BROKEN - 1]
        for name in ("losses", "rates"):
            del got[name][BROKEN]
        assert got["rates"] == expected["rates"]
        # the scale is another power of two from then on: fp16 gradients below its smallest normal number round differently
        assert_same_curve(got["losses"], expected["losses"], 2**-9)
