"""Training through Accelerate with us is training through Accelerate under DDP: losses, norms, rates and weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.accelerate_runs import Recipe, assert_same_weights, trained
from tests.support.clients import assert_same_curve
from tests.support.ranks import run_ranks

AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    }
}


def zero(stage: int, **block: Any) -> dict[str, Any]:
    """A config as people write one for Accelerate: what it can fill in is "auto"."""
    own: dict[str, Any] = {"stage": stage}
    if stage == 3:
        sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        own.update(dict.fromkeys(sizes, "auto"), stage3_gather_16bit_weights_on_model_save=True)
    return {**AUTO, "gradient_clipping": "auto", "zero_optimization": {**own, **block}}


def by_config(stage: int, *blocks: dict[str, Any], **settings: Any) -> Recipe:
    config = zero(stage)
    for block in blocks:
        config.update(block)
    return Recipe(plugin={"hf_ds_config": config}, **settings)


def by_fields(stage: int, **settings: Any) -> Recipe:
    return Recipe(plugin={"zero_stage": stage, "zero3_save_16bit_model": stage == 3}, **settings)


@cache
def _under_ddp(key: str) -> list[dict[str, Any]]:
    recipe: Recipe = _REFERENCES[key]
    return run_ranks(trained, 2, recipe, init=False)


_REFERENCES: dict[str, Recipe] = {}


def reference_of(recipe: Recipe) -> list[dict[str, Any]]:
    """What DDP comes to, computed once for all tests of the file that train the same way."""
    plain = recipe.reference()
    _REFERENCES[repr(plain)] = plain
    return _under_ddp(repr(plain))


def assert_trains_as_ddp(recipe: Recipe, tolerance: float = 1e-5) -> list[dict[str, Any]]:
    expected, got = reference_of(recipe), run_ranks(trained, 2, recipe, init=False)
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_curve(ours["losses"], theirs["losses"], tolerance)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=10 * tolerance)
        assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-9)
        assert_same_weights(ours["weights"], theirs["weights"], 10 * tolerance)
    return got


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fields_of_the_plugin_train_as_ddp_does(stage: int) -> None:
    assert_trains_as_ddp(by_fields(stage))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_config_with_its_own_optimizer_and_schedule_trains_as_ddp_does(stage: int) -> None:
    assert_trains_as_ddp(by_config(stage, ADAMW, WARMUP, optimizer="dummy", scheduler="warmup", epochs=2))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("optimizer", ["torch", "dummy"])
def test_a_schedule_given_as_a_callable_follows_updates(stage: int, optimizer: Any) -> None:
    if optimizer == "dummy":
        assert_trains_as_ddp(by_config(stage, ADAMW, optimizer="dummy", scheduler="callable"))
    else:
        assert_trains_as_ddp(by_config(stage, scheduler="torch"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_steps_at_the_boundaries_of_accelerate(stage: int) -> None:
    # Four micro-batches per pass: Accelerate makes the last one a boundary by itself. Below stage 2 it goes through no_sync
    assert_trains_as_ddp(by_fields(stage, accumulation=3, epochs=2, scheduler="torch"))


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_clipped_by_the_norm_that_clip_grad_norm_returns(stage: int) -> None:
    recipe = Recipe(plugin={"zero_stage": stage, "gradient_clipping": 0.1, "zero3_save_16bit_model": True}, clip=0.1)
    got = assert_trains_as_ddp(recipe)
    assert all(min(each["norms"]) > 0.1 for each in got)  # each update was clipped


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autocast_of_torch_through_our_config_is_that_of_accelerate(stage: int) -> None:
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    expected = reference_of(Recipe(mixed_precision="bf16"))
    for ours, theirs in zip(run_ranks(trained, 2, by_config(stage, autocast), init=False), expected, strict=True):
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
        assert ours["rates"] == theirs["rates"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_weights_with_masters_follow_autocast_closely(stage: int) -> None:
    plugin = {"zero_stage": stage, "zero3_save_16bit_model": True}
    expected = reference_of(Recipe(mixed_precision="bf16"))
    got = run_ranks(trained, 2, Recipe(plugin=plugin, mixed_precision="bf16"), init=False)
    for ours, theirs in zip(got, expected, strict=True):
        # both compute products of bf16, but ours also adds and normalizes in it: half a unit in the last place of 4
        assert_same_curve(ours["losses"], theirs["losses"], 4 * 2**-9)
        assert ours["rates"] == theirs["rates"]
