"""The host step in the native library: all tensors of a step as columns of numbers, in one call.

    parts -> numel, addresses, dtypes, row of `numbers`        the layout of `ds_update_tensors` in csrc/native.h

Called by `run`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepspeed.ops.host_step.parts import DTYPE_CODES, Parts
from deepspeed.ops.host_step.rules import Lamb, Rule
from deepspeed.ops.native import NativeLibrary

__all__ = ["lamb_apply_native", "lamb_update_native", "step_native"]

_LAMB_APPLY = Lamb.code + 1
_POINTERS = ("param", "grad", "state0", "state1", "values", "update", "squares", "step")
_DTYPES = ("param_dtype", "grad_dtype", "state0_dtype", "state1_dtype", "values_dtype")


class _Tensors(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("numel", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_DTYPES, "clears", "row")),
    ]


class _Columns:
    """The columns of several `Parts`, one after the other, each made where something needs it first.

    A column has zeros for parts that have nothing for it, before and after those that have.
    """

    def __init__(self, states: int) -> None:
        self._states = states
        self._count = 0
        self._columns: dict[str, array[int] | bytearray] = {"numel": array("q"), "row": array("i")}

    def add(self, parts: Parts, rows: Sequence[int]) -> None:
        """Take in `parts`, whose numbers are in `rows`."""
        self._extend("numel", "q", map(Tensor.numel, parts.params))
        self._extend("row", "i", rows)
        self._extend("step", "q", map(Tensor.data_ptr, parts.steps))
        states = [(f"state{number}", column) for number, column in enumerate(parts.states[: self._states])]
        common = parts.common_dtypes or [None] * (2 + len(states))
        for (name, tensors), dtype in zip([("param", parts.params), ("grad", parts.grads), *states], common, strict=False):
            self._tensors(name, tensors, dtype)
        if parts.values is not None:
            self._optional("values", parts.values)
        if parts.clears is not None:
            self._bytes("clears", bytes(parts.clears))
        self._count += len(parts)
        for column in self._columns.values():
            _fill(column, self._count)

    def keep_updates(self, updates: Sequence[Tensor | None]) -> None:
        """LAMB's room for the updates of all parts."""
        if any(update is not None for update in updates):
            self._columns["update"] = array("q", [0 if update is None else update.data_ptr() for update in updates])

    def call(self, native: NativeLibrary, code: int, numbers: array[float], squares: int = 0) -> None:
        """Update everything by the rule `code`; `squares` is an address."""
        tensors = _Tensors(count=self._count, squares=squares)
        keep = []
        for name, column in self._columns.items():
            if isinstance(column, bytearray):
                keep.append((ctypes.c_uint8 * len(column)).from_buffer(column))
                setattr(tensors, name, ctypes.addressof(keep[-1]) if column else 0)
            else:
                setattr(tensors, name, column.buffer_info()[0])
        function = native.function(
            "ds_update", ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(_Tensors), ctypes.c_void_p, ctypes.c_int32
        )
        if function(code, ctypes.byref(tensors), numbers.buffer_info()[0], torch.get_num_threads()) != 0:
            raise MemoryError(
                f"an optimizer step of {self._count} tensors found no memory for its list of them (about 200 bytes for each "
                "65,536 elements), and changed nothing. Free memory, or train a smaller part at a time (sub_group_size)."
            )

    def _tensors(self, name: str, tensors: Sequence[Tensor], common_dtype: torch.dtype | None) -> None:
        self._extend(name, "q", map(Tensor.data_ptr, tensors))
        if common_dtype is not None:
            self._bytes(f"{name}_dtype", bytes([DTYPE_CODES[common_dtype]]) * len(tensors))
        else:
            self._bytes(f"{name}_dtype", bytes([DTYPE_CODES[tensor.dtype] for tensor in tensors]))

    def _optional(self, name: str, tensors: Sequence[Tensor | None]) -> None:
        self._extend(name, "q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
        self._bytes(f"{name}_dtype", bytes([0 if tensor is None else DTYPE_CODES[tensor.dtype] for tensor in tensors]))

    def _extend(self, name: str, kind: str, values: Iterable[int]) -> None:
        column = self._columns.setdefault(name, array(kind))
        assert isinstance(column, array)  # only `_bytes` makes the others
        _fill(column, self._count)
        column.extend(values)

    def _bytes(self, name: str, values: bytes) -> None:
        column = self._columns.setdefault(name, bytearray())
        assert isinstance(column, bytearray)  # only `_extend` makes the others
        _fill(column, self._count)
        column += values


def _fill(column: array[int] | bytearray, count: int) -> None:
    """Zeros at the end of a column, up to `count`: parts that have nothing for it."""
    missing = count - len(column)
    if missing:
        column.extend(bytes(missing))


def step_native(native: NativeLibrary, work: Sequence[tuple[Rule, Parts, float]]) -> None:
    """See `run.step`; all rules are of one class."""
    columns, numbers = _gathered(work)
    columns.call(native, work[0][0].code, numbers)


def lamb_update_native(
    native: NativeLibrary, work: Sequence[tuple[Lamb, Parts, float]]
) -> tuple[Tensor, list[Tensor | None]]:
    """See `run.lamb_update`."""
    columns, numbers = _gathered([(rule, replace(parts, values=None), factor) for rule, parts, factor in work])
    updates = [
        None if all(state.dtype == torch.float32 for state in states) else torch.empty(p.numel(), dtype=torch.float32)
        for _, parts, _ in work
        for p, *states in zip(parts.params, *parts.states, strict=True)
    ]
    columns.keep_updates(updates)  # where states are rounded they do not give the update again
    squares_P2 = torch.zeros(len(updates), 2, dtype=torch.float64)
    columns.call(native, Lamb.code, numbers, squares_P2.data_ptr())
    return squares_P2, updates


def lamb_apply_native(
    native: NativeLibrary,
    work: Sequence[tuple[Lamb, Parts, float]],
    updates: Sequence[Tensor | None],
    ratios: Sequence[float],
) -> None:
    """See `run.lamb_apply`."""
    columns, numbers = _Columns(Lamb.states), array("d")
    row = 0
    for rule, parts, factor in work:
        for ratio in ratios[row : row + len(parts)]:
            numbers.extend(rule.row(factor, ratio))
        columns.add(replace(parts, clears=None), range(row, row + len(parts)))
        row += len(parts)
    columns.keep_updates(updates)
    columns.call(native, _LAMB_APPLY, numbers)


def _gathered(work: Sequence[tuple[Rule, Parts, float]]) -> tuple[_Columns, array[float]]:
    columns, numbers = _Columns(work[0][0].states if work else 0), array("d")
    for row, (rule, parts, factor) in enumerate(work):
        numbers.extend(rule.row(factor))
        columns.add(parts, [row] * len(parts))
    return columns, numbers
