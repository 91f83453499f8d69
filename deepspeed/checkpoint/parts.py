"""Reading a rank's part of a tensor from any checkpoint, however it is stored there.

    stored with the same part     one run of stored order: the bytes of the part and no others
    cut along the same dimension  from the stored parts, in blocks of rows; along dimension 0 in runs of the needed bytes
    cut along another one, whole  from the whole, likewise

Lives here: the choice, and how a range of elements gets into a tensor on any device. Does not live here: the arithmetic
(`sharding.recut`), bytes (`disk.gathering`). Called by `reader` and `engine.cuts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepspeed.checkpoint.disk.gathering import gather_rows
from deepspeed.checkpoint.disk.range_check import prepare_out
from deepspeed.sharding.cut import Cut
from deepspeed.sharding.recut import rows_of, uncut

if TYPE_CHECKING:
    from deepspeed.checkpoint.source import CheckpointSource

__all__ = ["fill", "read_part"]

_STAGING_NUMEL = 1 << 22
"""Elements read at a time when they cannot go straight into the destination."""


def read_part(source: CheckpointSource, name: str, wanted: Cut, rank: int, start: int, out: Tensor) -> Tensor:
    """Read elements `[start, start + out.numel())` of the flattened part that `rank` holds under `wanted`.

    Memory besides `out`: a few MiB. Not collective.

    Args:
        source: an open checkpoint of any layout.
        name: the tensor's global name.
        wanted: of the tensor's shape.
        rank: whose part.
        start: first element.
        out: flat tensor, on any device and of any dtype (elements are converted).

    Returns:
        `out`.

    Raises:
        ArgumentError: the range does not fit the part, or `wanted` is of another shape.
        CheckpointDamagedError: a file ends too early or does not hold what it should.
    """
    dtype, stored = source.dtype(name), source.cut(name)
    numel = wanted.rows * wanted.width(rank) * wanted.inner
    prepare_out(f"part {rank} of {name}", numel, dtype, start, None, out)
    is_stored_so = stored is not None and stored.dim == wanted.dim
    lying = stored if is_stored_so and stored is not None else uncut(source.shape(name), wanted.dim)

    def read_stored(at: int, into: memoryview) -> None:
        values = torch.frombuffer(into, dtype=dtype)
        if is_stored_so:
            source.read_stored(name, at, values)
        else:
            source.read(name, at, out=values)

    def read(at: int, into: memoryview) -> None:
        rows = rows_of(lying, wanted, rank, start + at, len(into) // dtype.itemsize)
        gather_rows(rows, dtype.itemsize, read_stored, into)

    fill(out, dtype, read)
    return out


def fill(out: Tensor, dtype: torch.dtype, read: Callable[[int, memoryview], None]) -> None:
    """Fill a flat tensor with elements of `dtype`: in place where it is contiguous, on the CPU and of that dtype.

    Args:
        out: on any device, of any dtype.
        dtype: of what is read.
        read: fills bytes with elements, the first of which has this number in `out`.
    """
    out = out.detach()
    if out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
        if out.numel():
            read(0, _bytes_of(out))
        return
    for at in range(0, out.numel(), _STAGING_NUMEL):
        staged = torch.empty(min(_STAGING_NUMEL, out.numel() - at), dtype=dtype)
        read(at, _bytes_of(staged))
        out[at : at + staged.numel()].copy_(staged)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.view(torch.uint8).numpy().data
