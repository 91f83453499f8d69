"""The host step on torch's calls: the same single operations as csrc/kernels/step.h, in the same order.

    parts -> chunks that stay in the cache -> fp32 -> multiply, add, ... on lists -> rounded back

Only operations that round once are used: no `alpha=`, `lerp`, `addcmul` or fused kernels, which may or may not contract to
fused multiply-adds. Called by `run` where the library is absent, and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.ops.host_step.parts import Parts
from deepspeed.ops.host_step.rules import Adagrad, Adam, Lamb, Lion, Rule, Sgd
from deepspeed.ops.host_step.squares import sum_of_squares_twin

__all__ = ["lamb_apply_twin", "lamb_update_twin", "step_twin"]

Tensors = list[Tensor]


class Part(NamedTuple):
    """One row of `Parts`, or a range of it."""

    param: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    step: Tensor
    values: Tensor | None
    clears_grad: bool


Numbers = list[float]

CHUNK_NUMEL = 1 << 17
"""Elements worked on at a time: five fp32 tensors of it fit in a core's share of the cache."""


@dataclass
class _Chunk:
    """1-D views of some parts, or of a range of one, with what is computed in fp32."""

    parts: list[Part]
    steps: Numbers
    params: Tensors
    grads: Tensors
    states: list[Tensors]

    def close(self, *, with_states: bool = True) -> None:
        """Round into the tensors of the parts what is not there already."""
        for part, wide in zip(self.parts, self.params, strict=True):
            if wide is not part.param:
                part.param.copy_(wide)
            if part.values is not None:
                part.values.copy_(part.param)
        for number, wides in enumerate(self.states if with_states else ()):
            for part, wide in zip(self.parts, wides, strict=True):
                if wide is not part.states[number]:
                    part.states[number].copy_(wide)


def step_twin(rule: Rule, columns: Parts, factor: float) -> None:
    """See `run.step`, for one rule."""
    update = _UPDATES[type(rule)]
    with torch.no_grad():
        parts = _counted(columns)
        for chunk in _chunks(rule, parts, factor):
            update(rule, chunk)
            chunk.close()


def lamb_update_twin(rule: Lamb, columns: Parts, factor: float) -> tuple[Tensor, Tensors]:
    """See `run.lamb_update`."""
    updates = [torch.empty(p.numel(), dtype=torch.float32) for p in columns.params]
    with torch.no_grad():
        parts = _counted(columns)
        for part, whole in zip(parts, updates, strict=True):
            begin = 0
            for chunk in _chunks(rule, [part], factor):
                (update,) = _lamb(rule, chunk)
                whole[begin : begin + update.numel()].copy_(update)
                begin += update.numel()
                for number, (wide,) in enumerate(chunk.states):
                    if wide is not chunk.parts[0].states[number]:
                        chunk.parts[0].states[number].copy_(wide)
        rows = [
            torch.stack([sum_of_squares_twin([part.param.detach().reshape(-1)]), sum_of_squares_twin([update])])
            for part, update in zip(parts, updates, strict=True)
        ]
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64), updates


def lamb_apply_twin(rule: Lamb, columns: Parts, updates: Sequence[Tensor], ratios: Sequence[float]) -> None:
    """See `run.lamb_apply`."""
    with torch.no_grad():
        for part, update, ratio in zip(_rows(columns), updates, ratios, strict=True):
            begin = 0
            for chunk in _chunks(rule, [part._replace(grad=update, clears_grad=False)], 1.0):
                (p,), (u,) = chunk.params, chunk.grads
                p.sub_(u.mul(rule.lr * ratio))
                chunk.close(with_states=False)
                begin += u.numel()


def _rows(parts: Parts) -> list[Part]:
    count = len(parts)
    states = zip(*parts.states, strict=True) if parts.states else [()] * count
    values, clears = parts.values or [None] * count, parts.clears or [False] * count
    return [Part(*row) for row in zip(parts.params, parts.grads, states, parts.steps, values, clears, strict=True)]


def _counted(parts: Parts) -> list[Part]:
    for step in parts.steps:
        step.add_(1)
    return _rows(parts)


def _chunks(rule: Rule, parts: Sequence[Part], factor: float) -> Iterator[_Chunk]:
    """`parts` cut and joined to at most `CHUNK_NUMEL` elements, with gradients times `factor`."""
    joined: list[Part] = []
    numel = 0
    for part in parts:
        for piece in _pieces(part, rule.states):
            if joined and numel + piece.param.numel() > CHUNK_NUMEL:
                yield _chunk(joined, rule.states, factor)
                joined, numel = [], 0
            joined.append(piece)
            numel += piece.param.numel()
    if joined:
        yield _chunk(joined, rule.states, factor)


def _pieces(part: Part, states: int) -> Iterator[Part]:
    flat = [each.detach().view(-1) for each in (part.param, part.grad, *part.states[:states])]
    values = None if part.values is None else part.values.detach().view(-1)
    for begin in range(0, flat[0].numel(), CHUNK_NUMEL):
        param, grad, *own = (each[begin : begin + CHUNK_NUMEL] for each in flat)
        here = None if values is None else values[begin : begin + CHUNK_NUMEL]
        yield Part(param, grad, tuple(own), part.step, here, part.clears_grad)


def _chunk(parts: list[Part], states: int, factor: float) -> _Chunk:
    grads = list(torch._foreach_mul([part.grad.float() for part in parts], factor))
    for part in parts:
        if part.clears_grad:
            part.grad.zero_()
    return _Chunk(
        parts,
        [float(part.step) for part in parts],
        [part.param.float() for part in parts],
        grads,
        [[part.states[number].float() for part in parts] for number in range(states)],
    )


# -- the rules. Each line is one rounded operation per element of csrc/kernels/step.h ----------------------------------


def _roots(tensors: Sequence[Tensor]) -> Tensors:
    """Square roots to the nearest fp32; torch's own of fp32 are not always the nearest. (fp64 is far more than enough.)"""
    return [each.double().sqrt_().float() for each in tensors]


def _with_decay(rule: Rule, chunk: _Chunk) -> Tensors:
    """Gradients, with the decay added to them where there is one."""
    if not rule.weight_decay:
        return chunk.grads
    return list(torch._foreach_add(torch._foreach_mul(chunk.params, rule.weight_decay), chunk.grads))


def _moments(chunk: _Chunk, grads: Tensors, beta1: float, beta2: float) -> tuple[Tensors, Tensors]:
    firsts, seconds = chunk.states
    torch._foreach_mul_(firsts, beta1)
    torch._foreach_add_(firsts, torch._foreach_mul(grads, 1.0 - beta1))
    squares = torch._foreach_mul(grads, grads)
    torch._foreach_mul_(squares, 1.0 - beta2)
    torch._foreach_mul_(seconds, beta2)
    torch._foreach_add_(seconds, squares)
    return firsts, seconds


def _adam(rule: Adam, chunk: _Chunk) -> None:
    numbers = [rule.rate_and_eps(step) for step in chunk.steps]
    grads = chunk.grads if rule.is_decoupled else _with_decay(rule, chunk)
    firsts, seconds = _moments(chunk, grads, rule.beta1, rule.beta2)
    roots = _roots(seconds)
    torch._foreach_add_(roots, [eps for _, eps in numbers])
    updates = torch._foreach_mul(firsts, [rate for rate, _ in numbers])
    torch._foreach_div_(updates, roots)
    if rule.is_decoupled and rule.weight_decay:
        torch._foreach_mul_(chunk.params, 1.0 - rule.lr * rule.weight_decay)
    torch._foreach_sub_(chunk.params, updates)


def _adagrad(rule: Adagrad, chunk: _Chunk) -> None:
    grads = _with_decay(rule, chunk)
    (sums,) = chunk.states
    torch._foreach_add_(sums, torch._foreach_mul(grads, grads))
    roots = _roots(sums)
    torch._foreach_add_(roots, rule.eps)
    updates = torch._foreach_mul(grads, rule.lr)
    torch._foreach_div_(updates, roots)
    torch._foreach_sub_(chunk.params, updates)


def _lion(rule: Lion, chunk: _Chunk) -> None:
    (momenta,) = chunk.states
    mixed = torch._foreach_mul(momenta, rule.beta1)
    torch._foreach_add_(mixed, torch._foreach_mul(chunk.grads, 1.0 - rule.beta1))
    torch._foreach_sign_(mixed)
    torch._foreach_mul_(mixed, rule.lr)
    if rule.weight_decay:
        torch._foreach_mul_(chunk.params, 1.0 - rule.lr * rule.weight_decay)
    torch._foreach_sub_(chunk.params, mixed)
    torch._foreach_mul_(momenta, rule.beta2)
    torch._foreach_add_(momenta, torch._foreach_mul(chunk.grads, 1.0 - rule.beta2))


def _sgd(rule: Sgd, chunk: _Chunk) -> None:
    grads = _with_decay(rule, chunk)
    (momenta,) = chunk.states
    for number, step in enumerate(chunk.steps):
        if step == 1:
            momenta[number].copy_(grads[number])
        else:
            momenta[number].mul_(rule.momentum).add_(grads[number].mul(1.0 - rule.dampening))
    updates = momenta
    if rule.is_nesterov:
        updates = list(torch._foreach_mul(momenta, rule.momentum))
        torch._foreach_add_(updates, grads)
    torch._foreach_sub_(chunk.params, torch._foreach_mul(updates, rule.lr))


def _lamb(rule: Lamb, chunk: _Chunk) -> Tensors:
    firsts, seconds = _moments(chunk, chunk.grads, rule.beta1, rule.beta2)
    corrections = [rule.corrections(step) for step in chunk.steps]
    updates = torch._foreach_mul(firsts, [first for first, _ in corrections])
    roots: Tensors = list(torch._foreach_mul(seconds, [second for _, second in corrections]))
    if rule.is_eps_inside:
        torch._foreach_add_(roots, rule.eps)
        roots = _roots(roots)
    else:
        roots = _roots(roots)
        torch._foreach_add_(roots, rule.eps)
    torch._foreach_div_(updates, roots)
    if rule.weight_decay:
        torch._foreach_add_(updates, torch._foreach_mul(chunk.params, rule.weight_decay))
    return list(updates)


_UPDATES: dict[type[Rule], Callable[..., None]] = {Adam: _adam, Adagrad: _adagrad, Lion: _lion, Sgd: _sgd}
