"""Native library or twin: the one place of the host step that asks.

Version counters: the library writes past torch, so what it has written is announced to autograd here. A graph that was
built before the step and needs the old values then says so, as after any in-place operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops.host_step.native import lamb_apply_native, lamb_update_native, step_native
from deepspeed.ops.host_step.parts import Parts
from deepspeed.ops.host_step.rules import Lamb, Rule
from deepspeed.ops.host_step.twin import lamb_apply_twin, lamb_update_twin, step_twin
from deepspeed.ops.native import library

__all__ = ["lamb_apply", "lamb_update", "step"]


def step(work: Sequence[tuple[Rule, Parts, float]]) -> None:
    """Update parameters and states: for each rule its parts, with gradients times its factor.

    Args:
        work: (rule, parts, factor); all rules of one class, not `Lamb`. No tensor appears twice.
    """
    if not work:
        return
    native = library(work[0][0].operator)
    if native is None:
        for rule, parts, factor in work:
            step_twin(rule, parts, factor)
        return
    step_native(native, work)
    _announce(work)


def lamb_update(work: Sequence[tuple[Lamb, Parts, float]]) -> tuple[Tensor, list[Tensor | None]]:
    """First pass of LAMB: take the gradients into the states.

    Returns:
        Sums of squares of each part's parameter and update, shape (parts, 2), fp64, in order; and what `lamb_apply` needs.
    """
    native = library(Lamb.operator)
    if native is not None:
        return lamb_update_native(native, work)
    found = [lamb_update_twin(rule, parts, factor) for rule, parts, factor in work]
    squares = torch.cat([each for each, _ in found]) if found else torch.zeros(0, 2, dtype=torch.float64)
    return squares, [update for _, updates in found for update in updates]


def lamb_apply(work: Sequence[tuple[Lamb, Parts, float]], updates: Sequence[Tensor | None], ratios: Sequence[float]) -> None:
    """Second pass of LAMB: subtract each part's update times rate and ratio; `work` and `updates` as in the first pass."""
    native = library(Lamb.operator)
    if native is not None:
        lamb_apply_native(native, work, updates, ratios)
        _announce(work)
        return
    begin = 0
    for rule, parts, _ in work:
        end = begin + len(parts)
        own = [update for update in updates[begin:end] if update is not None]  # the twin keeps all of them
        lamb_apply_twin(rule, parts, own, ratios[begin:end])
        begin = end


def _announce(work: Sequence[tuple[Rule, Parts, float]]) -> None:
    for _, parts, _ in work:
        torch.autograd.graph.increment_version(parts.params)
        torch.autograd.graph.increment_version([values for values in parts.values or () if values is not None])
