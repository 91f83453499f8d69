"""Floating-point elements from one type to another, as bytes: no torch, so commands that only move bytes start at once.

bfloat16, which NumPy does not have, is the upper half of an fp32 value; it is rounded to the nearest, ties to even, as torch
does. Element types have the spelling of safetensors.

Does not live here: which type a file is to have (`files`, which calls this).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CASTABLE", "cast_bytes"]

CASTABLE = ("F64", "F32", "F16", "BF16")
"""The types that are converted into each other; others are stored as they are."""

_NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_SIXTEEN, _ONE, _BELOW_HALF = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)
_QUIET_NAN = np.uint16(0x7FC0)


def cast_bytes(data: memoryview, source: str, target: str) -> memoryview:
    """The elements of `data`, of type `source`, as elements of type `target`; both of `CASTABLE`. `data` itself if equal."""
    if source == target:
        return data
    values: npt.NDArray[Any] = np.frombuffer(data, dtype=_NUMPY[source])
    floats = _widen(values) if source == "BF16" else values
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # too large becomes infinite, as in torch
        cast = _round(floats.astype(np.float32)) if target == "BF16" else floats.astype(_NUMPY[target])
    return cast.view(np.uint8).data


def _widen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The bits of bfloat16 values as fp32 values."""
    floats: npt.NDArray[Any] = (values.astype(np.uint32) << _SIXTEEN).view(np.float32)
    return floats


def _round(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The bits of fp32 values as bfloat16."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[Any] = ((bits + _BELOW_HALF + ((bits >> _SIXTEEN) & _ONE)) >> _SIXTEEN).astype(np.uint16)
    rounded[np.isnan(values)] = _QUIET_NAN  # rounding up could make infinity of it
    return rounded
