"""Make engines for tests, run them over `batches[step][micro_batch][rank]`, and read out what came of it.

Everything is read through the published functions, so that it is whole at every ZeRO stage; all ranks must read together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

import deepspeed
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

STATE_KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""State that is read: of Adam and its kin, and of SGD with momentum."""

SHARDS_PARAMETERS = 3
"""The ZeRO stage from which on a parameter is whole only while it is in use."""


@dataclass
class Outcome:
    """As `tests.support.reference.Reference`, from an engine's point of view; equal on all ranks."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    model_weights: dict[str, Tensor] = field(default_factory=dict)


def config(micro_batches: int = 1, rows: int = 4, **blocks: Any) -> dict[str, Any]:
    """A config for `rows` rows per micro-batch with `blocks` added."""
    return {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": micro_batches, **blocks}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    """The block of a config that asks for a ZeRO stage."""
    return {"zero_optimization": {"stage": stage, **keys}}


def make_engine(model: nn.Module, settings: dict[str, Any], **arguments: Any) -> DeepSpeedEngine:
    """`deepspeed.initialize` without the three other results."""
    return deepspeed.initialize(model=model, config=settings, **arguments)[0]


def train(engine: DeepSpeedEngine, batches: Sequence[Sequence[Sequence[tuple[Any, ...]]]], rank: int) -> Outcome:
    """Feed `engine` this rank's batches through forward, backward and step, and read it out."""
    outcome = Outcome()
    for step in batches:
        for micro_batch in step:
            loss = engine(*micro_batch[rank])
            engine.backward(loss)
            engine.step()
            outcome.losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        assert norm is not None
        outcome.norms.append(norm)
    outcome.weights = masters(engine)
    outcome.model_weights = model_weights(engine)
    return outcome


def masters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The whole values that the optimizer updates, by parameter name. Collective: all ranks call it."""
    found = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


def moments(engine: DeepSpeedEngine) -> dict[str, dict[str, Tensor]]:
    """Whole tensor state of the optimizer: parameter name -> state key -> tensor. Collective: all ranks call it."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, param in engine.module.named_parameters():
        per_key = {key: safe_get_full_optimizer_state(param, key) for key in STATE_KEYS}
        kept = {key: value for key, value in per_key.items() if value is not None}
        if kept:
            found[name] = kept
    return found


def model_weights(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The whole weights that the model computes with, by parameter name. Collective: all ranks call it."""
    named = dict(engine.module.named_parameters())
    with gathered(engine, list(named.values())):
        return {name: param.detach().clone() for name, param in named.items()}


def gathered(engine: DeepSpeedEngine, params: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
    """A context in which `params` are whole at every ZeRO stage."""
    if engine.zero_optimization_stage() < SHARDS_PARAMETERS:
        return contextlib.nullcontext()
    gather: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(params)
    return gather
