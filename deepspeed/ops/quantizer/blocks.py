"""Values to 8- or 4-bit integers and back, each block of neighbours with a scale of its own.

    values      |  block 0: block_numel values  |  block 1 ...  |  the last may be shorter  |
    codes       |  one byte each; with 4 bits two in a byte, the first in the low half      |
    scales      |  s0                           |  s1 ...                                   |
    zeros       |  z0                           |  z1 ...          (asymmetric only)        |

    symmetric    s = max |x| / (2^(bits-1) - 1)      code = round(x / s), signed          x' = code * s
    asymmetric   s = (max x - min x) / (2^bits - 1)  code = round((x - min x) / s)        x' = code * s + z,  z = min x

So |x - x'| is at most s / 2 and a last place, and below s with stochastic rounding, whose mean is x. A block that holds a
value that is not finite comes back as NaN throughout: an overflow stays visible. Arithmetic is fp32 for every dtype, so two
kinds of blocks are outside the bound: where 2^bits / s is too large for fp32 (values below some 2^-120) all come back as 0,
or as min x; and where max x - min x is, asymmetric codes come back as NaN.

    native    csrc/quant: one pass over host memory, the block's extremes found while it is in the cache
    twin      the same operations on torch's calls, equal bits; on devices, and where the library is absent

Shapes: `N` values, `B` = ceil(N / block_numel) blocks. Source of block-wise scales: arXiv:2110.02861, section 2.1, with
integers instead of its dynamic data type.

Not here: rounding in place of storing (`rounding`). For collectives of quantised shards and for compression.
"""

from __future__ import annotations

import ctypes
import errno
import math
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError
from deepspeed.ops.native import NativeLibrary, library
from deepspeed.ops.quantizer.arithmetic import block_scale, codes_of

__all__ = ["QuantizedBlocks", "dequantize_blocks", "dequantize_blocks_twin", "quantize_blocks", "quantize_blocks_twin"]

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_QUANTIZE = (_POINTER, _INT, _LONG, _LONG, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT)
_DEQUANTIZE = (_POINTER, _LONG, _LONG, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT)
_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class QuantizedBlocks(NamedTuple):
    """A tensor as integers."""

    codes: Tensor
    """int8 of shape (N,), or uint8 when asymmetric; with 4 bits uint8 of shape (ceil(N / 2),)."""

    scales: Tensor
    """fp32, shape (B,)."""

    zeros: Tensor | None
    """fp32, shape (B,); None when symmetric."""


def quantize_blocks(
    tensor: Tensor,
    bits: int = 8,
    block_numel: int = 2048,
    symmetric: bool = True,
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> QuantizedBlocks:
    """Quantise a tensor, taken as flat.

    Args:
        tensor: floating-point values of any shape.
        bits: 8 or 4.
        block_numel: values that share a scale; even with 4 bits, unless there is one block.
        symmetric: see the module's docstring.
        stochastic: round up with the probability of the fraction, instead of to the nearest (ties to even).
        generator: where the random numbers come from; on the tensor's device. None: torch's own.

    Raises:
        ValueError: an argument is outside its range.
    """
    _check(tensor.dtype, tensor.numel(), bits, block_numel)
    with torch.no_grad():
        flat_N = tensor.detach().reshape(-1).contiguous()
        noise_N = torch.rand(flat_N.shape, generator=generator, device=flat_N.device) if stochastic else None
        native = library("quantizer")
        if native is None or flat_N.device.type != "cpu" or flat_N.dtype not in _KINDS:
            return quantize_blocks_twin(flat_N, bits, block_numel, symmetric, noise_N)
        return _quantize(native, flat_N, bits, block_numel, symmetric, noise_N)


def dequantize_blocks(
    quantized: QuantizedBlocks,
    bits: int,
    block_numel: int,
    numel: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Return the values that `quantize_blocks` made integers of, shape (numel,), rounded to `dtype` at the end.

    Args:
        quantized: what it returned.
        bits: as it was given.
        block_numel: as it was given.
        numel: values there were.
        dtype: of the result.
        out: contiguous tensor that takes the result, instead of a new one; `dtype` is then not read.

    Raises:
        ValueError: an argument is outside its range, or codes, scales and `numel` do not fit each other.
    """
    codes, scales = quantized.codes, quantized.scales
    out = torch.empty(numel, dtype=dtype, device=codes.device) if out is None else out
    _check(out.dtype, numel, bits, block_numel)
    blocks, code_numel = -(-numel // block_numel), numel if bits == 8 else -(-numel // 2)
    if codes.numel() != code_numel or scales.numel() != blocks or out.numel() != numel or not out.is_contiguous():
        raise ArgumentError(
            f"dequantize_blocks was given {codes.numel()} codes, {scales.numel()} scales, an output of {tuple(out.shape)}, "
            f"numel={numel}, bits={bits}, block_numel={block_numel}; {code_numel} codes, {blocks} scales and a contiguous "
            f"output of {numel} are needed. Give the arguments that quantize_blocks was given."
        )
    with torch.no_grad():
        native = library("quantizer")
        if native is None or codes.device.type != "cpu" or out.dtype not in _KINDS:
            return out.copy_(dequantize_blocks_twin(quantized, bits, block_numel, numel).view_as(out))
        _dequantize(native, quantized, bits, block_numel, out)
        return out


def quantize_blocks_twin(
    flat_N: Tensor, bits: int, block_numel: int, symmetric: bool, noise_N: Tensor | None = None
) -> QuantizedBlocks:
    """`quantize_blocks` on torch's calls; `noise_N` in [0, 1) rounds at random."""
    parts = []
    for start, stop, count in _rows(flat_N.numel(), block_numel):
        values_BK = flat_N[start:stop].view(count, -1).float()
        noise_BK = None if noise_N is None else noise_N[start:stop].view(count, -1)
        scale = block_scale(values_BK, bits, symmetric)
        parts.append((codes_of(values_BK, scale, noise_BK).flatten(), scale))
    codes_N = torch.cat([codes for codes, _ in parts]) if parts else flat_N.float()
    scales_B, zeros_B = (_joined([getattr(scale, name) for _, scale in parts], flat_N) for name in ("scale", "zero"))
    return QuantizedBlocks(_packed(codes_N, bits, symmetric), scales_B, None if symmetric else zeros_B)


def dequantize_blocks_twin(quantized: QuantizedBlocks, bits: int, block_numel: int, numel: int) -> Tensor:
    """`dequantize_blocks` on torch's calls, in fp32."""
    codes, scales_B, zeros_B = quantized
    codes_N = codes.float() if bits == 8 else _unpacked(codes, numel, zeros_B is None)
    out_N, block = torch.empty(numel, device=codes.device), 0
    for start, stop, count in _rows(numel, block_numel):
        scale_B1 = scales_B[block : block + count, None]
        values_BK = codes_N[start:stop].view(count, -1) * scale_B1
        if zeros_B is not None:
            values_BK += zeros_B[block : block + count, None]
        out_N[start:stop] = values_BK.flatten()
        block += count
    return out_N


def _rows(numel: int, block_numel: int) -> list[tuple[int, int, int]]:
    """(start, stop, blocks) of the whole blocks, and of the shorter one behind them."""
    whole = numel // block_numel
    rows = [(0, whole * block_numel, whole)] if whole else []
    return [*rows, (whole * block_numel, numel, 1)] if numel % block_numel else rows


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, device=like.device)


def _packed(codes_N: Tensor, bits: int, symmetric: bool) -> Tensor:
    if bits == 8:
        return codes_N.to(torch.int8 if symmetric else torch.uint8)
    nibbles_N = codes_N.to(torch.int16).bitwise_and(0xF).to(torch.uint8)
    pairs_P2 = torch.nn.functional.pad(nibbles_N, (0, nibbles_N.numel() % 2)).view(-1, 2)
    return pairs_P2[:, 0] | (pairs_P2[:, 1] << 4)


def _unpacked(codes: Tensor, numel: int, symmetric: bool) -> Tensor:
    nibbles_N = torch.stack((codes & 0xF, codes >> 4), dim=1).flatten()[:numel].to(torch.int16)
    return ((nibbles_N ^ 8) - 8 if symmetric else nibbles_N).float()


def _quantize(
    native: NativeLibrary, flat_N: Tensor, bits: int, block_numel: int, symmetric: bool, noise_N: Tensor | None
) -> QuantizedBlocks:
    numel, kind = flat_N.numel(), _KINDS[flat_N.dtype]
    codes = torch.empty(numel if bits == 8 else -(-numel // 2), dtype=torch.int8 if symmetric and bits == 8 else torch.uint8)
    scales_B = torch.empty(-(-numel // block_numel))
    zeros_B = None if symmetric else torch.empty_like(scales_B)
    places = (_place(noise_N), _place(codes), _place(scales_B), _place(zeros_B))
    function = native.function("ds_quantize", _INT, *_QUANTIZE)
    status = function(_place(flat_N), kind, numel, block_numel, bits, symmetric, *places, torch.get_num_threads())
    _check_status(status)
    return QuantizedBlocks(codes, scales_B, zeros_B)


def _dequantize(native: NativeLibrary, quantized: QuantizedBlocks, bits: int, block_numel: int, out: Tensor) -> None:
    codes, scales_B, zeros_B = (None if each is None else each.contiguous() for each in quantized)
    places = (_place(scales_B), _place(zeros_B), _place(out))
    function = native.function("ds_dequantize", _INT, *_DEQUANTIZE)
    sizes = (out.numel(), block_numel, bits, zeros_B is None)
    status = function(_place(codes), *sizes, *places, _KINDS[out.dtype], torch.get_num_threads())
    _check_status(status)


def _check_status(status: int) -> None:
    if status == -errno.ENOMEM:
        raise MemoryError("block quantisation found no memory for its own bookkeeping.")
    assert status == 0  # it refuses what `_check` refuses


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(dtype: torch.dtype, numel: int, bits: int, block_numel: int) -> None:
    if not dtype.is_floating_point:
        raise ArgumentError(f"block quantisation was given dtype {dtype}, but a floating-point one is needed.")
    if bits not in (8, 4):
        raise ArgumentError(f"block quantisation was given bits={bits!r}, but 8 or 4 is needed.")
    if block_numel < 1 or numel < 0:
        raise ArgumentError(f"block quantisation was given block_numel={block_numel}, numel={numel}, which count elements.")
    if bits == 4 and block_numel % 2 and block_numel < numel:
        raise ArgumentError(
            f"block quantisation was given bits=4 and block_numel={block_numel}: two codes share a byte, so an even number "
            f"is needed, for example {math.ceil(block_numel / 2) * 2}."
        )
