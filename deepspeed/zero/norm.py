"""The true global gradient norm of flat buffers, in one pass that also tells whether every value is finite.

Squares are summed row by row of about a thousand elements in at least fp32, and the rows in fp64, so the norm of a billion
elements is as exact as that of a thousand. Padding is zero and does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ROW_NUMEL = 1024  # short enough that an fp32 sum keeps six to seven digits
_BLOCK_NUMEL = _ROW_NUMEL << 8  # of 16-bit values: converted in the cache, not in memory


def sum_of_squares(flats: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements: a 0-d fp64 tensor (fp32 where the device has no fp64) on the flats' device.

    Infinity or NaN among the values, or squares beyond the range of fp32, give a non-finite result.
    """
    norms = [torch.linalg.vector_norm(rows, dim=1) for flat in flats for rows in _rows(flat)]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    joined = torch.cat(norms)
    return (joined if joined.device.type == "mps" else joined.double()).square().sum()


def _rows(flat: Tensor) -> Iterator[Tensor]:
    """`flat` in pieces of shape (rows, elements) and at least fp32; a complex number counts as its two parts."""
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    is_16_bit = flat.dtype not in (torch.float32, torch.float64)
    for block in torch.split(flat, _BLOCK_NUMEL) if is_16_bit else (flat,):
        values = block.float() if is_16_bit else block
        even = values.numel() // _ROW_NUMEL * _ROW_NUMEL
        if even:
            yield values[:even].view(-1, _ROW_NUMEL)
        if even < values.numel():
            yield values[even:].view(1, -1)
