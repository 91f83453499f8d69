"""Rounding a tensor to what few bits can tell: quantised and back in one call, for training with quantised weights.

Not here: storing the integers (`blocks`). Called by clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError
from deepspeed.ops.quantizer.arithmetic import block_scale, codes_of, values_of
from deepspeed.ops.quantizer.blocks import dequantize_blocks, quantize_blocks

__all__ = ["ds_quantizer"]


def ds_quantizer(
    input: Tensor,
    groups: int = 1,
    bit_num: int = 8,
    sr: bool = False,
    asym: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `input` rounded to 2^bit_num values for each group; a new tensor of its shape and dtype, without gradient.

    Args:
        input: floating-point values, on any device.
        groups: equal parts of the flattened tensor, each with a scale of its own.
        bit_num: 2 to 16.
        sr: round stochastically instead of to the nearest.
        asym: spread the values between a group's least and greatest, instead of around 0.
        generator: where stochastic rounding takes its numbers from; None: torch's own.

    Raises:
        ValueError: an argument is outside its range, or the groups are not equal.
    """
    if not input.dtype.is_floating_point or not 2 <= bit_num <= 16:
        raise ArgumentError(
            f"ds_quantizer was given {input.dtype} and bit_num={bit_num!r}, but a floating-point dtype and 2 to 16 bits are "
            "needed."
        )
    if groups < 1 or input.numel() % groups:
        raise ArgumentError(
            f"ds_quantizer was given groups={groups} for {input.numel()} elements of shape {tuple(input.shape)}, but "
            "groups must be equal. Choose a divisor."
        )
    numel = input.numel() // groups
    if numel == 0:
        return input.detach().clone()
    if bit_num == 8 or (bit_num == 4 and numel % 2 == 0):
        quantized = quantize_blocks(input, bit_num, numel, not asym, stochastic=sr, generator=generator)
        return dequantize_blocks(quantized, bit_num, numel, input.numel(), input.dtype).view(input.shape)
    with torch.no_grad():
        values_GK = input.detach().reshape(groups, numel).float()
        noise_GK = torch.rand(values_GK.shape, generator=generator, device=input.device) if sr else None
        scale = block_scale(values_GK, bit_num, not asym)
        return values_of(codes_of(values_GK, scale, noise_GK), scale).to(input.dtype).view(input.shape)
