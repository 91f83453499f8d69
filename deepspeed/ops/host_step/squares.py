"""Sum of squares of tensors of any float dtype in host memory, in double and in one order: the norm, and the finite check.

    a span of 65,536 elements      64 groups x 32 rows x 32 lanes
      rows of a group              added one after the other, lane by lane
      groups, then lanes           added by halves: the first half to the second, and again
    spans                          one after the other, over all tensors

The order depends on nothing but the lengths, so any number of threads, any instruction set and the twin give the same bits.
Called by `zero.norm`; LAMB's norms are sums of the same kind (csrc/kernels/squares.h).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops.host_step.parts import DTYPE_CODES
from deepspeed.ops.native import library

__all__ = ["SPAN_NUMEL", "SQUARES_DTYPES", "sum_of_squares", "sum_of_squares_twin"]

SPAN_NUMEL = 1 << 16
_GROUPS, _ROWS, _LANES = 64, 32, 32
_CODES = {**DTYPE_CODES, torch.float64: 4}

SQUARES_DTYPES = frozenset(_CODES)
"""What `sum_of_squares` reads."""


def sum_of_squares(flats: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements: 0-d fp64, non-finite exactly when an element is (or fp64 squares overflow).

    Args:
        flats: contiguous tensors in host memory, of `SQUARES_DTYPES`.
    """
    native = library()
    if native is None:
        return sum_of_squares_twin(flats)
    rows = array("q", [n for flat in flats for n in (flat.numel(), flat.data_ptr(), _CODES[flat.dtype])])
    function = native.function(
        "ds_total_of_squares", ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    )
    total = torch.zeros((), dtype=torch.float64)
    if function(rows.buffer_info()[0], len(flats), torch.get_num_threads(), total.data_ptr()) != 0:
        return sum_of_squares_twin(flats)  # no memory for its list of spans: the twin needs none
    return total


def sum_of_squares_twin(flats: Sequence[Tensor]) -> Tensor:
    """The same on torch's calls."""
    total = 0.0
    for flat in flats:
        for span in torch.split(flat.detach().reshape(-1), SPAN_NUMEL) if flat.numel() else ():
            total += _span(span)
    return torch.tensor(total, dtype=torch.float64)


def _span(span: Tensor) -> float:
    padded = torch.zeros(SPAN_NUMEL, dtype=torch.float64)
    padded[: span.numel()].copy_(span)
    squares_GRL = padded.mul_(padded).view(_GROUPS, _ROWS, _LANES)
    sums_GL = torch.zeros(_GROUPS, _LANES, dtype=torch.float64)
    for row in range(_ROWS):
        sums_GL.add_(squares_GRL[:, row])
    return float(_halved(_halved(sums_GL)).item())


def _halved(sums: Tensor) -> Tensor:
    """Sum over the first axis, whose length is a power of two."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]
