"""The host step in the native library: all parts of a step as one table of numbers, in one call.

    part -> numel, addresses, dtypes, flags, row of `numbers`        the layout of `ds_step_tensor` in csrc/native.h

Called by `run`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.ops.host_step.parts import DTYPE_CODES, Part
from deepspeed.ops.host_step.rules import Lamb, Rule
from deepspeed.ops.native import NativeLibrary

__all__ = ["lamb_apply_native", "lamb_update_native", "step_native"]

_LAMB_APPLY = Lamb.code + 1


def step_native(native: NativeLibrary, work: Sequence[tuple[Rule, Sequence[Part], float]]) -> None:
    """See `run.step`; all rules are of one class."""
    table, numbers = array("q"), array("d")
    for row, (rule, parts, factor) in enumerate(work):
        numbers.extend(rule.row(factor))
        for part in parts:
            table.extend(_entry(part, row, rule.states))
    _call(native, work[0][0].code, table, numbers)


def lamb_update_native(
    native: NativeLibrary, work: Sequence[tuple[Lamb, Sequence[Part], float]]
) -> tuple[Tensor, list[Tensor | None]]:
    """See `run.lamb_update`."""
    table, numbers = array("q"), array("d")
    squares_P2 = torch.zeros(sum(len(parts) for _, parts, _ in work), 2, dtype=torch.float64)
    updates: list[Tensor | None] = []
    for row, (rule, parts, factor) in enumerate(work):
        numbers.extend(rule.row(factor))
        for part in parts:
            kept = _kept(part)
            table.extend(_entry(part._replace(values=None), row, rule.states, kept, squares_P2[len(updates)].data_ptr()))
            updates.append(kept)
    _call(native, Lamb.code, table, numbers)
    return squares_P2, updates


def lamb_apply_native(
    native: NativeLibrary,
    work: Sequence[tuple[Lamb, Sequence[Part], float]],
    updates: Iterable[Tensor | None],
    ratios: Iterable[float],
) -> None:
    """See `run.lamb_apply`."""
    table, numbers = array("q"), array("d")
    row, kept, ratio = 0, iter(updates), iter(ratios)
    for rule, parts, factor in work:
        for part in parts:
            numbers.extend(rule.row(factor, next(ratio)))
            table.extend(_entry(part._replace(clears_grad=False), row, rule.states, next(kept)))
            row += 1
    _call(native, _LAMB_APPLY, table, numbers)


def _kept(part: Part) -> Tensor | None:
    """Room for the update where the states, once rounded, no longer give it."""
    is_exact = all(state.dtype == torch.float32 for state in part.states)
    return None if is_exact else torch.empty(part.param.numel(), dtype=torch.float32)


def _entry(part: Part, row: int, states: int, update: Tensor | None = None, squares: int = 0) -> tuple[int, ...]:
    param, grad, own, step, values, clears_grad = part
    first, second = own[0] if states else None, own[1] if states > 1 else None
    code = DTYPE_CODES
    return (
        param.numel(),
        param.data_ptr(),
        grad.data_ptr(),
        0 if first is None else first.data_ptr(),
        0 if second is None else second.data_ptr(),
        0 if values is None else values.data_ptr(),
        0 if update is None else update.data_ptr(),
        squares,
        step.data_ptr(),
        code[param.dtype]
        | code[grad.dtype] << 8
        | (0 if first is None else code[first.dtype]) << 16
        | (0 if second is None else code[second.dtype]) << 24
        | (0 if values is None else code[values.dtype]) << 32,
        int(clears_grad),
        row,
    )


def _call(native: NativeLibrary, code: int, table: array[int], numbers: array[float]) -> None:
    function = native.function(
        "ds_step", None, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32
    )
    count = len(table) // _ENTRY_NUMBERS
    function(code, table.buffer_info()[0], count, numbers.buffer_info()[0], torch.get_num_threads())


_ENTRY_NUMBERS = 12
