"""Make engines for tests, run them over `batches[step][micro_batch][rank]`, and read out what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.engine.engine import DeepSpeedEngine


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
    outcome.model_weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return outcome


def masters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The tensors that the optimizer updates, by parameter name."""
    assert engine.optimizer is not None
    return {
        member.name: values.detach().clone()
        for flat in engine.optimizer.master.flats
        for member, values in flat.named_slices(flat.master_F)
    }


def moments(engine: DeepSpeedEngine) -> dict[str, dict[str, Tensor]]:
    """Tensor state of the optimizer: parameter name -> state key -> tensor in the parameter's shape."""
    from deepspeed.zero.state_io import state_pieces

    assert engine.optimizer is not None
    found: dict[str, dict[str, Tensor]] = {}
    for piece in state_pieces(engine.optimizer.master):
        per_key = found.setdefault(piece.member.name, {})
        whole = per_key.setdefault(piece.key, torch.zeros(piece.member.param.shape, dtype=piece.values.dtype))
        whole.view(-1)[piece.start : piece.start + piece.values.numel()] = piece.values
    return found
