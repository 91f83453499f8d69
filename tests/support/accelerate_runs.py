"""One training program over Accelerate, as its users write it, for runs with us and runs under DDP.

    recipe.plugin is None       Accelerator()                       the model under DDP, MULTI_CPU over gloo: the reference
    recipe.plugin is a dict     Accelerator(deepspeed_plugin=...)   the same lines through us

Both take the same seeds, batches and code; what a recipe says of optimizer and schedule is said in each one's own words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.support.clients import Sentences, tiny_llama, whole_weights

__all__ = [
    "RATE",
    "Recipe",
    "assert_same_weights",
    "build_accelerator",
    "fits",
    "loader",
    "prepared",
    "prepared_parts",
    "trained",
    "weights",
]

RATE = 5e-3
WARMUP_STEPS = 4
DECAY = 0.05


@dataclass(frozen=True)
class Recipe:
    """How to train. `plugin` has the arguments of a DeepSpeedPlugin; without it the run is the reference."""

    plugin: dict[str, Any] | None = None
    accumulation: int = 1
    clip: float | None = 1.0
    """What the loop hands to `clip_grad_norm_`. Accelerate writes 1.0 into our config where that says "auto"."""
    mixed_precision: str = "no"
    optimizer: Literal["torch", "dummy"] = "torch"
    scheduler: Literal["none", "torch", "warmup", "callable"] = "none"
    epochs: int = 1
    rows: int = 32
    batch_rows: int = 4
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of `tiny_llama`."""

    def reference(self) -> Recipe:
        """The same training under DDP."""
        return Recipe(**{**vars(self), "plugin": None})


def build_accelerator(recipe: Recipe, **settings: Any) -> Any:
    """An Accelerator over gloo: without a device Accelerate finds no back end by itself."""
    from accelerate import Accelerator, InitProcessGroupKwargs, data_loader
    from accelerate.utils import DeepSpeedPlugin

    data_loader.is_datasets_available = lambda: False  # none of ours is one; to import and see takes a rank 2 s
    plugin = None if recipe.plugin is None else DeepSpeedPlugin(**recipe.plugin)
    return Accelerator(
        cpu=plugin is None,  # else gloo alone is "not distributed" to Accelerate: no DDP, and no word of it
        deepspeed_plugin=plugin,
        mixed_precision=recipe.mixed_precision,
        gradient_accumulation_steps=recipe.accumulation,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        **settings,
    )


def loader(recipe: Recipe) -> DataLoader[dict[str, Tensor]]:
    """Batches in the order of the data."""
    return DataLoader(Sentences(rows=recipe.rows), batch_size=recipe.batch_rows)


def falls(update: int) -> float:
    """A factor of the rate that falls with each update."""
    return 1.0 / (1.0 + 0.5 * update)


def rises(update: int) -> float:
    """WarmupLR with `warmup_type` linear: a straight line from 0, of which it takes the first point twice."""
    return min(1.0, max(0, update - 1) / WARMUP_STEPS)


def halves(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """What `lr_scheduler_callable` is given."""
    return LambdaLR(optimizer, falls)


def prepared_parts(recipe: Recipe, model: nn.Module, world_size: int) -> tuple[Any, Any]:
    """Optimizer and scheduler (or None) in the words of the recipe."""
    from accelerate.utils import DummyOptim, DummyScheduler

    with_us = recipe.plugin is not None
    optimizer: Any
    if with_us and recipe.optimizer == "dummy":
        optimizer = DummyOptim(list(model.parameters()), lr=RATE, weight_decay=DECAY)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    if recipe.scheduler == "none":
        return optimizer, None
    if recipe.scheduler == "torch":
        return optimizer, LambdaLR(optimizer, falls)
    if not with_us:
        factor = rises if recipe.scheduler == "warmup" else falls
        # Accelerate steps a scheduler of its own once per rank at each update, and leaves ours to the engine: once
        return optimizer, LambdaLR(optimizer, lambda tick: factor(tick // world_size))
    if recipe.scheduler == "warmup":
        return optimizer, DummyScheduler(optimizer, warmup_num_steps=WARMUP_STEPS)
    return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=halves)


def prepared(accelerator: Any, recipe: Recipe) -> tuple[Any, Any, Any, Any]:
    """The user's model, optimizer, loader and scheduler, each through `prepare`."""
    model = tiny_llama(**recipe.model)
    optimizer, scheduler = prepared_parts(recipe, model, accelerator.num_processes)
    parts = [model, optimizer, loader(recipe), *([] if scheduler is None else [scheduler])]
    done = accelerator.prepare(*parts)
    return done[0], done[1], done[2], None if scheduler is None else done[3]


def fits(
    accelerator: Any, model: Any, optimizer: Any, batches: Iterable[Any], scheduler: Any = None, clip: float | None = 1.0
) -> dict[str, list[float]]:
    """One pass over `batches` as in Accelerate's guide: losses of micro-batches, norms and rates of updates."""
    seen: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                seen["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        seen["losses"].append(loss.item())
        if accelerator.sync_gradients:
            seen["rates"].append(float(optimizer.param_groups[0]["lr"]))
    return seen


def weights(accelerator: Any, model: Any) -> dict[str, Tensor] | None:
    """Whole weights of a prepared model: what Accelerate hands out, which must be the model's own.

    At ZeRO stage 3 it hands them to rank 0, and other ranks gather theirs. None on a rank that holds parts of layers.
    """
    state = accelerator.get_state_dict(model)
    own = accelerator.unwrap_model(model)
    if any(hasattr(param, "ds_id") for param in own.parameters()):
        held = whole_weights(own)
        assert state is None or all(torch.equal(state[name], value) for name, value in held.items())
        state = held if state is None else state
    return None if state is None else {name: value.detach().float().cpu().clone() for name, value in state.items()}


def assert_same_weights(got: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Fail unless what two ranks got of `weights` agrees, to the bit unless a tolerance says otherwise."""
    assert got.keys() == expected.keys() != set()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance, msg=lambda told, name=name: f"{name}: {told}")


def trained(rank: int, world_size: int, recipe: Recipe) -> dict[str, Any]:
    """Train by the recipe. Returns losses, norms, rates and the last weights."""
    accelerator = build_accelerator(recipe)
    model, optimizer, batches, scheduler = prepared(accelerator, recipe)
    seen: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    for _ in range(recipe.epochs):
        for name, values in fits(accelerator, model, optimizer, batches, scheduler, recipe.clip).items():
            seen[name] += values
    seen["weights"] = weights(accelerator, model)
    return seen
