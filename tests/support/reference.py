"""What training must come to: the same model on the same global batch, in one process, with plain PyTorch.

No line of the library is used here. Gradients round where data-parallel ranks round them:

    ZeRO stages 0, 1    each rank adds up its micro-batches (accumulation dtype); at the end the mean over ranks
    ZeRO stages 2, 3    the mean over ranks of each micro-batch; the means are added up (accumulation dtype)

    mean                what each rank brings, rounded to the communication dtype, added in rank order in at least fp32,
                        divided, rounded to the communication dtype
    update              mean x factor in the masters' dtype; factor = 1 / (micro-batches x loss scale) x clip coefficient

Called by tests of whole trainings; models and batches are `tests.support.models`.
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
    accumulation_dtype: torch.dtype | None = None,
    communication_dtype: torch.dtype | None = None,
    averages_each_micro_batch: bool = False,
    unused_counts_as_zero: bool = False,
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
        accumulation_dtype: dtype in which micro-batches are added up; None for the gradients' own.
        communication_dtype: dtype in which gradients travel; None for the gradients' own, whatever they are added up in.
        averages_each_micro_batch: average over ranks before adding up micro-batches, as ZeRO stages 2 and 3 do.
        unused_counts_as_zero: a parameter that no rank used in a step has the gradient zero, so that its moments decay;
            off, plain torch's way: the optimizer passes it over.
        scheduler_factory: makes a schedule that is stepped after each optimizer step.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    masters = dict(trained)
    if dtype is not None:
        masters = {name: nn.Parameter(p.detach().clone().float()) for name, p in trained}
        model.to(dtype)
    optimizer = optimizer_factory(masters.values())
    scheduler = scheduler_factory(optimizer) if scheduler_factory is not None else None
    averager = _Averager(accumulation_dtype, communication_dtype, averages_each_micro_batch)
    outcome = Reference()
    for step in batches[:steps]:
        loss, gradients = _mean_gradients(model, step, loss_scale, averager)
        for name, master in masters.items():
            gradient = gradients[name]
            if gradient is None and unused_counts_as_zero:
                gradient = torch.zeros_like(master)
            master.grad = None if gradient is None else gradient.to(master.dtype, copy=True)
        outcome.losses.append(loss)
        outcome.norms.append(_scale_and_clip(masters.values(), 1.0 / (loss_scale * len(step)), clip))
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


@dataclass(frozen=True)
class _Averager:
    """Where gradients are rounded on their way from ranks and micro-batches to one mean."""

    accumulation_dtype: torch.dtype | None
    communication_dtype: torch.dtype | None
    is_per_micro_batch: bool

    def mean(self, per_micro_batch: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
        """Sum over micro-batches of the mean over ranks of `per_micro_batch[micro_batch][rank]`; None where all are None."""
        own = next((g.dtype for per_rank in per_micro_batch for g in per_rank if g is not None), None)
        if own is None:
            return None
        if self.is_per_micro_batch:
            return self._sum([self._over_ranks(per_rank, own, own) for per_rank in per_micro_batch])
        kept_in = self.accumulation_dtype or own
        return self._over_ranks([self._sum(of_rank) for of_rank in zip(*per_micro_batch, strict=True)], own, kept_in)

    def _sum(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        present = [g for g in gradients if g is not None]
        if not present:
            return None
        total = present[0].to(self.accumulation_dtype or present[0].dtype)
        for gradient in present[1:]:
            total = (total + gradient).to(total.dtype)  # added in the wider of the two, rounded once
        return total

    def _over_ranks(self, gradients: Sequence[Tensor | None], own: torch.dtype, kept_in: torch.dtype) -> Tensor | None:
        present = [g for g in gradients if g is not None]
        if not present or len(gradients) == 1:
            return present[0] if present else None
        sent = self.communication_dtype or own
        wide = torch.promote_types(torch.promote_types(sent, present[0].dtype), torch.float32)
        total = torch.zeros_like(present[0], dtype=wide)
        for gradient in present:
            total += gradient.to(sent).to(wide)
        return (total / len(gradients)).to(sent).to(kept_in)


def _mean_gradients(
    model: nn.Module, step: Sequence[Sequence[tuple[Any, ...]]], loss_scale: float, averager: _Averager
) -> tuple[float, dict[str, Tensor | None]]:
    """Return the mean loss, and per name the sum over micro-batches of the mean over ranks of the scaled gradient."""
    found: dict[str, list[list[Tensor | None]]] = {name: [[] for _ in step] for name, _ in model.named_parameters()}
    total_loss = 0.0
    for number, micro_batch in enumerate(step):
        for batch in micro_batch:
            model.zero_grad(set_to_none=True)
            loss = model(*batch)
            (loss * loss_scale).backward()
            total_loss += loss.item()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                is_sparse = gradient is not None and gradient.is_sparse
                found[name][number].append(gradient.to_dense() if gradient is not None and is_sparse else gradient)
    model.zero_grad(set_to_none=True)
    return total_loss / (len(step[0]) * len(step)), {name: averager.mean(each) for name, each in found.items()}


def _scale_and_clip(masters: Iterable[nn.Parameter], factor: float, clip: float | None) -> float:
    """Multiply gradients by `factor` and the clip coefficient in one product; return the norm between the two."""
    gradients = [p.grad for p in masters if p.grad is not None]
    norm = factor * math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    factor *= 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))  # the epsilon of torch.nn.utils.clip_grad_norm_
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
