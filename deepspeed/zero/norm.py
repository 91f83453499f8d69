"""The true global gradient norm of flat buffers, in one pass that also tells whether every value is finite.

Squares are summed cache block by cache block in at least fp32, and the blocks in fp64, so the norm of a billion elements
is as exact as that of a thousand. Padding is zero and does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK_NUMEL = 1 << 19


def sum_of_squares(flats: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements: a 0-d fp64 tensor (fp32 where the device has no fp64) on the flats' device.

    Infinity or NaN among the values, or squares beyond the range of fp32, give a non-finite result.
    """
    parts = [_block(block) for flat in flats for block in torch.split(flat, _BLOCK_NUMEL) if block.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    total = torch.stack(parts)
    return (total if total.device.type == "mps" else total.double()).sum()


def _block(values: Tensor) -> Tensor:
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()  # a block: small enough to be scratch in the cache
    return torch.dot(values, values)
