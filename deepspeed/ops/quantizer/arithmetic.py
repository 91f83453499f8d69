"""The arithmetic of blocks that are rows of a matrix, for any number of bits, on torch's calls.

One order of single operations in fp32, which csrc/quant follows bit by bit.

Shapes: `B` blocks of `K` values. Called by `blocks` and `rounding`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockScale", "block_scale", "codes_of", "values_of"]


class BlockScale(NamedTuple):
    """How the values of each block become integers; all of shape (B,)."""

    scale: Tensor
    """What one step of the code is worth; NaN for a block with a value that is not finite."""
    zero: Tensor
    """The value of code 0."""
    inverse: Tensor
    """1 / scale; 0 where that is no number: all values of the block are equal, or the block is not finite."""
    low: int
    high: int
    """Least and greatest code."""


def block_scale(values_BK: Tensor, bits: int, symmetric: bool) -> BlockScale:
    """Find the scale of each block of fp32 values."""
    if symmetric:
        high = 2 ** (bits - 1) - 1
        size_B = values_BK.abs().amax(1)
        zero_B, low = torch.zeros_like(size_B), -high
    else:
        high, low = 2**bits - 1, 0
        zero_B = values_BK.amin(1) + 0.0  # -0 becomes 0
        size_B = (values_BK.amax(1) + 0.0) - zero_B
    is_finite_B = size_B.isfinite()  # not, where a value is not, nor where the difference is too large for fp32
    high_B = torch.full_like(size_B, high)  # a tensor: torch turns division of and by a number into a multiplication
    inverse_B = high_B / size_B
    return BlockScale(
        torch.where(is_finite_B, size_B / high_B, torch.nan),
        torch.where(is_finite_B, zero_B, 0.0),
        torch.where(is_finite_B & inverse_B.isfinite(), inverse_B, 0.0),
        low,
        high,
    )


def codes_of(values_BK: Tensor, scale: BlockScale, noise_BK: Tensor | None = None) -> Tensor:
    """The integers, as fp32 of shape (B, K); `noise_BK` in [0, 1) rounds up where it is below the fraction."""
    exact_BK = (values_BK - scale.zero[:, None]) * scale.inverse[:, None]
    if noise_BK is None:
        codes_BK = exact_BK.round()
    else:
        floor_BK = exact_BK.floor()
        codes_BK = floor_BK + (noise_BK < exact_BK - floor_BK)
    codes_BK.clamp_(scale.low, scale.high)
    return torch.where(scale.scale.isnan()[:, None], 0.0, codes_BK)


def values_of(codes_BK: Tensor, scale: BlockScale) -> Tensor:
    """The values that the integers stand for, shape (B, K)."""
    values_BK = codes_BK * scale.scale[:, None]
    return values_BK if scale.low < 0 else values_BK + scale.zero[:, None]
