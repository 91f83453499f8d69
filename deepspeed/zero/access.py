"""Full-precision weight, gradient and optimizer state of one parameter, read and written from outside the engine.

    param --- its Place ---> flat group, slot ---> master, gradients: a range of the flat buffer
                                             `---> optimizer: the slices that the range runs through

Values have the parameter's own shape and at least fp32. A parameter that no engine trains has none of them: get gives None,
set refuses. What is written must be the same on all ranks. Today every rank holds everything (stage 0), so nothing here
communicates; call it on all ranks all the same.

Not here: the buffers (`zero.flat`), all state at once (`zero.state_io`). `deepspeed.utils` shows these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sharding import Slot
from deepspeed.zero.flat import FlatGroup, place_of
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.state_io import state_of


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the value that the optimizer updates; None when no engine trains `param`."""
    found = place_of(param)
    if found is None:
        return None
    flat, slot = found[0], _slot(*found)
    return _wide_copy(flat.master_F[slot.start : slot.stop]).view(param.shape)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the value that the optimizer updates, and the model's rounded copy with it.

    Raises:
        UsageError: no engine trains `param`.
        ArgumentError: `value` has another shape.
    """
    flat, position = _place("safe_set_full_fp32_param", param, value)
    slot = _slot(flat, position)
    with torch.no_grad():
        flat.master_F[slot.start : slot.stop].copy_(value.reshape(-1))
        flat.write_back(slot.start, slot.stop)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of state `optim_state_key`, for example "exp_avg".

    Returns:
        None when no engine trains `param`, before its first update, and for a key that is not a tensor of its shape.
    """
    found = place_of(param)
    views = [] if found is None else _state(*found, optim_state_key)
    return _wide_copy(torch.cat(views)).view(param.shape) if views else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace state `optim_state_key`.

    Raises:
        UsageError: no engine trains `param`, or it has no such state (yet).
        ArgumentError: `value` has another shape.
    """
    views = _state(*_place("safe_set_full_optimizer_state", param, value), optim_state_key)
    if not views:
        raise UsageError(
            f"safe_set_full_optimizer_state({optim_state_key!r}): the optimizer has no such state for a parameter of shape "
            f"{tuple(param.shape)}. State exists after the first update; check the key."
        )
    for view, part in zip(views, torch.split(value.reshape(-1), [view.numel() for view in views]), strict=True):
        view.copy_(part)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the gradient of the mean loss: averaged over ranks and micro-batches, without loss scale, not clipped.

    Returns:
        None when no engine trains `param`, when it has no gradient, and while the gradient is not reduced: outside the time
        between the backward of an accumulation boundary and its `engine.step()`.
    """
    found = place_of(param)
    optimizer = None if found is None else _optimizer_of(found[0])
    if found is None or optimizer is None:
        return None
    flat, position = found
    slot = _slot(flat, position)
    is_partial = optimizer.reducer.axis.size > 1 and not optimizer.reducer.is_reduced
    if is_partial or (flat.accumulates_in_place and param.grad is None):
        return None
    flat.collect(position, position + 1)
    return (_wide_copy(flat.gradients_F[slot.start : slot.stop]) * _factor(optimizer)).view(param.shape)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient; `value` is in the units of `safe_get_full_grad`. Call when that gives a gradient.

    Raises:
        UsageError: no engine trains `param`.
        ArgumentError: `value` has another shape.
    """
    flat, position = _place("safe_set_full_grad", param, value)
    slot = _slot(flat, position)
    optimizer = _optimizer_of(flat)
    assert optimizer is not None  # the engine lives, or `param` had no place
    flat.collect(position, position + 1)
    flat.gradients_F[slot.start : slot.stop].copy_(_wide_copy(value.detach()).reshape(-1) / _factor(optimizer))


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient that there is by `update_func(gradient, parameter)`; other parameters are passed over."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _place(function: str, param: nn.Parameter, value: Tensor) -> tuple[FlatGroup, int]:
    found = place_of(param)
    if found is None:
        raise UsageError(
            f"{function}() was given a parameter of shape {tuple(param.shape)} that no engine trains. Pass a parameter of "
            "engine.module that the optimizer holds."
        )
    if value.shape != param.shape:
        raise ArgumentError(
            f"{function}() was given a value of shape {tuple(value.shape)} for a parameter of shape {tuple(param.shape)}. "
            "Pass the whole value, in the parameter's shape."
        )
    return found


def _optimizer_of(flat: FlatGroup) -> ZeroOptimizer | None:
    optimizer = flat.optimizer()
    return optimizer if isinstance(optimizer, ZeroOptimizer) else None


def _slot(flat: FlatGroup, position: int) -> Slot:
    return flat.layout.slots[position]


def _state(flat: FlatGroup, position: int, key: str) -> list[Tensor]:
    optimizer = _optimizer_of(flat)
    return [] if optimizer is None else state_of(optimizer.master, flat, _slot(flat, position), key)


def _factor(optimizer: ZeroOptimizer) -> float:
    return optimizer.gradient_factor()


def _wide_copy(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
