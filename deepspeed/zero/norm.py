"""The true global gradient norm of flat buffers, in one pass that also tells whether every value is finite.

    host memory      `ops.host_step.sum_of_squares`: in fp64, in an order that nothing but the lengths decides
    devices          row by row of about a thousand elements in at least fp32, and the rows in fp64

So the norm of a billion elements is as exact as that of a thousand. Padding is zero and does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.ops import host_step
from deepspeed.ops.host_step.squares import SQUARES_DTYPES
from deepspeed.topology.mesh import AxisGroup

_ROW_NUMEL = 1024  # short enough that an fp32 sum keeps six to seven digits
_BLOCK_NUMEL = _ROW_NUMEL << 8  # of 16-bit values: converted in the cache, not in memory


def sum_of_squares(flats: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements: a 0-d fp64 tensor (fp32 where the device has no fp64) on the flats' device.

    Infinity or NaN among the values gives a non-finite result; so may, on devices, squares beyond the range of fp32.
    """
    flats = [torch.view_as_real(flat).view(-1) if flat.is_complex() else flat for flat in flats]
    if all(flat.device.type == "cpu" for flat in flats):
        return host_step.sum_of_squares([_readable(flat) for flat in flats])
    norms = [_row_norms(rows) for flat in flats for rows in _rows(flat)]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    joined = torch.cat(norms)
    return (joined if joined.device.type == "mps" else joined.double()).square().sum()


def sum_over_shards(local: Tensor, axis: AxisGroup) -> Tensor:
    """Add `local` (0-d) over the ranks of the shard axis. Collective; with one rank it is `local` itself."""
    if axis.size > 1:
        comm.all_reduce(local, group=axis.group)
    return local


def total(flat: Tensor) -> Tensor:
    """Sum of all elements, a 0-d tensor: finite when all are, up to the range of the dtype (of fp32 for fp16)."""
    if flat.dtype != torch.float16:
        return flat.sum()
    if flat.device.type != "cpu":
        return flat.sum(dtype=torch.float32)  # converted on the fly
    blocks = torch.split(flat, _BLOCK_NUMEL)  # a sum of finite values can overflow fp16; fp32 at once would need a copy
    return torch.stack([block.sum(dtype=torch.float32) for block in blocks]).sum()


def _row_norms(rows: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=None if rows.dtype == wide else wide)
    return norms


def _readable(flat: Tensor) -> Tensor:
    return flat if flat.dtype in SQUARES_DTYPES and flat.is_contiguous() else flat.contiguous().double()


def _rows(flat: Tensor) -> Iterator[Tensor]:
    """`flat` in pieces of shape (rows, elements). Devices convert 16 bits while they read."""
    even = flat.numel() // _ROW_NUMEL * _ROW_NUMEL
    if even:
        yield flat[:even].view(-1, _ROW_NUMEL)
    if even < flat.numel():
        yield flat[even:].view(1, -1)
