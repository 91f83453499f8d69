"""Full-precision weight, gradient and optimizer state of one parameter, read and written from outside the engine.

    param --- its Place ---> flat group, slot ---> this rank's parts of it: ranges of shard space
                                             `---> optimizer: the slices that those run through

    full     the whole value, in the parameter's shape; the ranks of the shard axis bring their parts together: all of them
             call, for the same parameters in the same order
    local    this rank's part alone, 1-D (empty where it has none); no other rank is asked

Values have at least fp32. A parameter that no engine trains has none of them: get gives None, set refuses. What is written
in full must be the same on all ranks.

Not here: the layout (`zero.flat`), all state at once (`zero.state_io`). `deepspeed.utils` shows these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.sharding import Fragment
from deepspeed.zero.flat import FlatGroup, place_of
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.state_io import editing_state_of, state_of

Part = tuple[Fragment, Tensor]
"""Where in the flattened parameter (`param_start`), and a 1-D view of the values."""

# -- whole values -----------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the value that the optimizer updates; None when no engine trains `param`."""
    found = _trained(param)
    if found is None:
        return None
    with _agreeing(found[0]):
        parts = _master(*found)
    return _whole(*found, parts)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the value that the optimizer updates, and the model's rounded copy with it.

    Raises:
        UsageError: no engine trains `param`.
        ArgumentError: `value` has another shape.
    """
    flat, position = _place("safe_set_full_fp32_param", param, value)
    flat.write_parameter(position, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of state `optim_state_key`, for example "exp_avg".

    Returns:
        None when no engine trains `param`, before its first update, and for a key that is not a tensor of its shape.
    """
    found = _trained(param)
    if found is None:
        return None
    with _agreeing(found[0]):
        parts = _state(*found, optim_state_key)
    held = torch.tensor(sum(fragment.numel for fragment, _ in parts), device=found[0].values.device)
    _add_over_ranks(held, found[0])
    numel = found[0].layout.slots[found[1]].numel
    return _whole(*found, parts) if int(held.item()) == numel and numel else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace state `optim_state_key`.

    Raises:
        UsageError: no engine trains `param`, or it has no such state (yet).
        ArgumentError: `value` has another shape.
    """
    flat, position = _place("safe_set_full_optimizer_state", param, value)
    with _agreeing(flat), _editing_state(flat, position, optim_state_key) as parts:
        if not parts and flat.own_parts(position):
            raise UsageError(
                f"safe_set_full_optimizer_state({optim_state_key!r}): the optimizer has no such state for a parameter of "
                f"shape {tuple(value.shape)}. State exists after the first update; check the key."
            )
        _write(parts, value.detach().reshape(-1))


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the gradient of the mean loss: averaged over ranks and micro-batches, without loss scale, not clipped.

    Returns:
        None when no engine trains `param`, when it has no gradient, and while the gradient is not reduced: outside the time
        between the backward of an accumulation boundary and its `engine.step()`.
    """
    found = _trained(param)
    optimizer = None if found is None else _optimizer_of(found[0])
    if found is None or optimizer is None or not _has_gradient(param, *found, optimizer):
        return None
    return _whole(*found, _gradient(*found)).mul_(optimizer.gradient_factor())


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient; `value` is in the units of `safe_get_full_grad`. Call when that gives a gradient.

    Raises:
        UsageError: no engine trains `param`.
        ArgumentError: `value` has another shape.
    """
    flat, position = _place("safe_set_full_grad", param, value)
    optimizer = _optimizer_of(flat)
    assert optimizer is not None  # the engine lives, or `param` had no place
    _write(_gradient(flat, position), _wide_copy(value.detach()).reshape(-1) / optimizer.gradient_factor())


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient that there is by `update_func(gradient, parameter)`; other parameters are passed over."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# -- this rank's part -------------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A 1-D copy of this rank's part of the value that the optimizer updates; None when no engine trains `param`."""
    found = _trained(param)
    return None if found is None else _joined(found[0], _master(*found))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of the value that the optimizer updates, and of the model's copy. All ranks call it.

    Raises:
        UsageError: no engine trains `param`.
        ArgumentError: `value` has another number of elements than the part.
    """
    flat, position = _place("safe_set_local_fp32_param", param, None)
    fragments = flat.own_parts(position)
    _require_numel("safe_set_local_fp32_param", fragments, value)
    flat.before_edit()
    with torch.no_grad(), _agreeing(flat), flat.rewriting():
        with ExitStack() as stack:
            places = [(f, f.buffer_start, f.buffer_start + f.numel) for f in fragments]
            parts = [(f, stack.enter_context(flat.editing_master(begin, end, reads=False))) for f, begin, end in places]
            _write_joined(parts, value)
        for fragment in fragments:
            flat.write_back(fragment.buffer_start, fragment.buffer_start + fragment.numel)
    bucket = flat.layout.bucket_of(position)
    if not flat.is_sharded and flat.axis.size > 1:
        flat.gatherer.gather_in_place(bucket.start, bucket.stop).wait()
        flat.reopen()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A 1-D copy of this rank's part of state `optim_state_key`; None when there is no such state (yet)."""
    found = _trained(param)
    if found is None:
        return None
    parts = _state(*found, optim_state_key)
    return _joined(found[0], parts) if parts else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of state `optim_state_key`.

    Raises:
        UsageError: no engine trains `param`.
        ArgumentError: `value` has another number of elements than the part.
    """
    flat, position = _place("safe_set_local_optimizer_state", param, None)
    with _editing_state(flat, position, optim_state_key) as parts:
        _require_numel("safe_set_local_optimizer_state", [fragment for fragment, _ in parts], value)
        _write_joined(parts, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A 1-D copy of this rank's part of what `safe_get_full_grad` gives; None when that gives None."""
    found = _trained(param)
    optimizer = None if found is None else _optimizer_of(found[0])
    if found is None or optimizer is None or not _has_gradient(param, *found, optimizer):
        return None
    return _joined(found[0], _gradient(*found)).mul_(optimizer.gradient_factor())


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of the gradient; `value` is in the units of `safe_get_local_grad`.

    Raises:
        UsageError: no engine trains `param`.
        ArgumentError: `value` has another number of elements than the part.
    """
    flat, position = _place("safe_set_local_grad", param, None)
    optimizer = _optimizer_of(flat)
    assert optimizer is not None  # the engine lives, or `param` had no place
    parts = _gradient(flat, position)
    _require_numel("safe_set_local_grad", [fragment for fragment, _ in parts], value)
    _write_joined(parts, _wide_copy(value.detach()) / optimizer.gradient_factor())


# -- parts ------------------------------------------------------------------------------------------------------------


def _trained(param: nn.Parameter) -> tuple[FlatGroup, int] | None:
    found = place_of(param)
    return found if found is not None and found[0].kind.is_trained else None


def _place(function: str, param: nn.Parameter, value: Tensor | None) -> tuple[FlatGroup, int]:
    found = _trained(param)
    if found is None:
        raise UsageError(
            f"{function}() was given a parameter of shape {tuple(param.shape)} that no engine trains. Pass a parameter of "
            "engine.module that the optimizer holds."
        )
    flat, position = found
    shape = flat.shapes[flat.layout.slots[position].index]
    if value is not None and value.shape != shape:
        raise ArgumentError(
            f"{function}() was given a value of shape {tuple(value.shape)} for a parameter of shape {tuple(shape)}. "
            "Pass the whole value, in the parameter's shape."
        )
    return found


def _optimizer_of(flat: FlatGroup) -> ZeroOptimizer | None:
    optimizer = flat.optimizer()
    return optimizer if isinstance(optimizer, ZeroOptimizer) else None


def _master(flat: FlatGroup, position: int) -> list[Part]:
    optimizer = _optimizer_of(flat)
    if optimizer is not None:
        optimizer.master.adopt_edit(flat, position)
    return [(f, flat.read_master(f.buffer_start, f.buffer_start + f.numel)) for f in flat.own_parts(position)]


def _state(flat: FlatGroup, position: int, key: str) -> list[Part]:
    optimizer = _optimizer_of(flat)
    return [] if optimizer is None else state_of(optimizer.master, flat, position, key)


def _editing_state(flat: FlatGroup, position: int, key: str) -> AbstractContextManager[list[Part]]:
    optimizer = _optimizer_of(flat)
    return nullcontext([]) if optimizer is None else editing_state_of(optimizer.master, flat, position, key)


def _agreeing(flat: FlatGroup) -> AbstractContextManager[None]:
    """What one rank meets with its tier inside, all ranks of the shard axis raise. Collective where there is a tier."""
    optimizer = _optimizer_of(flat)
    return nullcontext() if optimizer is None else optimizer.master.residence.agreeing()


def _has_gradient(param: nn.Parameter, flat: FlatGroup, position: int, optimizer: ZeroOptimizer) -> bool:
    if optimizer.reducer.axis.size > 1 and not optimizer.reducer.is_reduced:
        return False
    if flat.gradients.keeps_param_grads:
        return param.grad is not None
    return flat.gradients.holds(_bucket_number(flat, position))


def _bucket_number(flat: FlatGroup, position: int) -> int:
    return flat.layout.buckets.index(flat.layout.bucket_of(position))


def _gradient(flat: FlatGroup, position: int) -> list[Part]:
    if flat.gradients.keeps_param_grads:  # edits of `param.grad` count
        flat.gradients.collect(_bucket_number(flat, position))
    return [(f, flat.gradients.shard(f.buffer_start, f.buffer_start + f.numel)) for f in flat.own_parts(position)]


def _whole(flat: FlatGroup, position: int, parts: list[Part]) -> Tensor:
    """All ranks' parts, in the parameter's shape. Collective over the shard axis."""
    slot = flat.layout.slots[position]
    dtype = torch.promote_types(flat.kind.master_dtype, torch.float32)  # the same on ranks that hold no part
    whole = torch.zeros(slot.numel, dtype=dtype, device=flat.values.device)
    for fragment, values in parts:
        whole[fragment.param_start : fragment.param_start + fragment.numel].copy_(values)
    _add_over_ranks(whole, flat)
    return whole.view(flat.shapes[slot.index])


def _add_over_ranks(tensor: Tensor, flat: FlatGroup) -> None:
    if flat.axis.size > 1 and tensor.numel():
        comm.all_reduce(tensor, group=flat.axis.group)


def _joined(flat: FlatGroup, parts: list[Part]) -> Tensor:
    values = [values for _, values in parts]
    return _wide_copy(torch.cat(values)) if values else torch.zeros(0, device=flat.values.device)


def _write(parts: list[Part], whole: Tensor) -> None:
    with torch.no_grad():
        for fragment, values in parts:
            values.copy_(whole[fragment.param_start : fragment.param_start + fragment.numel])


def _write_joined(parts: list[Part], value: Tensor) -> None:
    with torch.no_grad():
        sizes = [values.numel() for _, values in parts]
        for (_, values), part in zip(parts, torch.split(value.detach().reshape(-1), sizes) if sizes else (), strict=True):
            values.copy_(part)


def _require_numel(function: str, parts: list[Fragment], value: Tensor) -> None:
    numel = sum(part.numel for part in parts)
    if value.numel() != numel:
        raise ArgumentError(
            f"{function}() was given {value.numel()} elements; this rank's part of the parameter has {numel}. Read it with "
            "the getter of the same name, change it, and give it back."
        )


def _wide_copy(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
