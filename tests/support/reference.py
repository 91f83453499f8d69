"""What training must come to: the same model on the same global batch, in one process, with plain PyTorch.

No line of the library is used here. The mean gradient over ranks is formed rank by rank, so that 16-bit gradients round
where data-parallel ranks round them: each rank adds up its micro-batches in the dtype of the model, then the ranks are
averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batches = Sequence[Sequence[Sequence[tuple[Any, ...]]]]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

FP64_ROUNDING = 1e-12
"""Most that weights of an fp64 model may differ (`relative_difference`) where only the order of sums does.

fp64 rounds at 1.1e-16 per operation: twenty steps of a few hundred operations, none of which cancels much, leave it ample.
"""


@dataclass
class Reference:
    """Outcome of a run: one loss and one gradient norm (before clipping) per step; tensors by parameter name.

    `weights` are those that the optimizer works on: fp32 masters when the model trains in 16 bits. `model_weights` are
    the model's own. `state` is parameter name -> state name -> tensor or number.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    model_weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


def train_reference(
    model: nn.Module,
    optimizer_factory: OptimizerFactory,
    batches: Batches,
    steps: int | None = None,
    *,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
    loss_scale: float = 1.0,
    reduce_dtype: torch.dtype | None = None,
    scheduler_factory: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Reference:
    """Train `model` in place and return what came of it.

    Args:
        model: `model(*batch)` returns the mean loss of the batch.
        optimizer_factory: makes the optimizer from the parameters that train (the masters, when `dtype` is given).
        batches: `batches[step][micro_batch][rank]`, all of one size, so that the mean of means is the mean.
        steps: how many of `batches` to use; None for all.
        clip: largest global 2-norm of the gradient; None for no clipping.
        dtype: train the model in this dtype with fp32 masters (copies of the weights before rounding them to `dtype`,
            which for a model already in `dtype` are the rounded ones). None: the optimizer works on the weights themselves.
        loss_scale: factor on the loss in backward, taken out again after the gradients are in the masters' dtype.
        reduce_dtype: dtype in which ranks are averaged; None for the gradients' own.
        scheduler_factory: makes a schedule that is stepped after each optimizer step.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    masters = dict(trained)
    if dtype is not None:
        masters = {name: nn.Parameter(p.detach().clone().float()) for name, p in trained}
        model.to(dtype)
    optimizer = optimizer_factory(masters.values())
    scheduler = scheduler_factory(optimizer) if scheduler_factory is not None else None
    outcome = Reference()
    for step in batches[:steps]:
        loss, gradients = _mean_gradients(model, step, loss_scale, reduce_dtype)
        for name, master in masters.items():
            gradient = gradients[name]
            master.grad = None if gradient is None else gradient.to(master.dtype) / (loss_scale * len(step))
        outcome.losses.append(loss)
        outcome.norms.append(_clip(masters.values(), clip))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for name, parameter in trained:
                parameter.copy_(masters[name])
    outcome.weights = {name: master.detach().clone() for name, master in masters.items()}
    outcome.model_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    outcome.state = {name: dict(optimizer.state[master]) for name, master in masters.items() if master in optimizer.state}
    return outcome


def relative_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest |got - want| over all tensors, divided by the largest |want|; names must agree, 0.0 when empty."""
    assert got.keys() == want.keys(), f"names differ: {sorted(got.keys() ^ want.keys())}"
    difference = largest = 0.0
    for name, wanted in want.items():
        assert got[name].shape == wanted.shape, f"{name}: shape {tuple(got[name].shape)}, not {tuple(wanted.shape)}"
        if wanted.numel():
            here = (got[name].double() - wanted.double()).abs().max().item()
            if not math.isfinite(here):  # max() would pass over NaN
                return math.inf
            difference = max(difference, here)
            largest = max(largest, wanted.double().abs().max().item())
    return difference / largest if difference else 0.0


def _mean_gradients(
    model: nn.Module, step: Sequence[Sequence[tuple[Any, ...]]], loss_scale: float, reduce_dtype: torch.dtype | None
) -> tuple[float, dict[str, Tensor | None]]:
    """Return the mean loss, and the mean over ranks of each rank's sum over micro-batches of the scaled gradient."""
    world_size = len(step[0])
    total_loss = 0.0
    sums: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    for rank in range(world_size):
        model.zero_grad(set_to_none=True)
        for micro_batch in step:
            loss = model(*micro_batch[rank])
            (loss * loss_scale).backward()
            total_loss += loss.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                gradient = gradient.to(reduce_dtype or gradient.dtype, copy=True)
                before = sums[name]
                sums[name] = gradient if before is None else before + gradient
    model.zero_grad(set_to_none=True)
    means = {name: None if total is None else total / world_size for name, total in sums.items()}
    return total_loss / (world_size * len(step)), means


def _clip(parameters: Iterable[nn.Parameter], clip: float | None) -> float:
    kept = list(parameters)
    norm = torch.nn.utils.clip_grad_norm_(kept, math.inf if clip is None else clip)
    return norm.item()
