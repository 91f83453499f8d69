"""Bytes of a part put together from the parts that are stored, in blocks of rows.

    file of rank 0   |=====     |=====     |        read as they lie, a few MiB at a time
    file of rank 1   |==  |==  |==  |                     |  NumPy copies the columns of all rows at once
    out              |=====|==|=====|==|=====|==|  <------'

Long runs are read straight into place. What a row takes from a part of which it needs short runs only is read with the gaps
between them: more bytes, far fewer reads.

Does not live here: which elements lie where (`sharding.recut`), reading a stored range (`reader`, `export.weights_source`,
`parts`, which call this). Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from deepspeed.sharding.recut import Rows

__all__ = ["gather_rows"]

_LONG_NBYTES = 64 << 10
"""A run of at least this is read by itself."""

_BLOCK_NBYTES = 4 << 20

ReadStored = Callable[[int, memoryview], None]
"""Fills bytes with the elements of stored order from a number on."""


def gather_rows(rows: Iterable[Rows], item_nbytes: int, read: ReadStored, out: memoryview) -> None:
    """Fill `out`; needs at most a few MiB besides it.

    Args:
        rows: what goes where, in elements.
        item_nbytes: bytes of an element.
        read: gives the bytes that are stored.
        out: bytes, of as many elements as `rows` were asked for.
    """
    for each in rows:
        if _is_long(each, item_nbytes):
            _read_runs(each, item_nbytes, read, out)
        else:
            _read_blocks(each, item_nbytes, read, out)


def _is_long(rows: Rows, item_nbytes: int) -> bool:
    """Whether each run is worth a read, or the gaps between them are too long to be read too."""
    columns = rows.columns
    gathered = sum(each.numel for each in columns)
    span = max(each.start + each.numel for each in columns) - min(each.start for each in columns)
    is_one = rows.times == len(columns) == 1
    return is_one or gathered * item_nbytes >= _LONG_NBYTES * len(columns) or span * item_nbytes > _BLOCK_NBYTES


def _read_runs(rows: Rows, item_nbytes: int, read: ReadStored, out: memoryview) -> None:
    for row in range(rows.times):
        start, at = rows.start + row * rows.stride, rows.at + row * rows.at_stride
        for each in rows.columns:
            begin_nbytes = (at + each.at) * item_nbytes
            read(start + each.start, out[begin_nbytes : begin_nbytes + each.numel * item_nbytes])


def _read_blocks(rows: Rows, item_nbytes: int, read: ReadStored, out: memoryview) -> None:
    low = min(each.start for each in rows.columns)
    numel = max(each.start + each.numel for each in rows.columns) - low
    stride = rows.stride if rows.times > 1 else numel
    at_once = min(rows.times, max(1, _BLOCK_NBYTES // (stride * item_nbytes)))
    block = np.empty(at_once * stride * item_nbytes, dtype=np.uint8)
    filled = np.frombuffer(out, dtype=np.uint8)
    for first in range(0, rows.times, at_once):
        count = min(at_once, rows.times - first)
        needed = (count - 1) * stride + numel  # the last row ends with its last column
        read(rows.start + first * rows.stride + low, block[: needed * item_nbytes].data)
        there = block[: count * stride * item_nbytes].reshape(count, stride * item_nbytes)
        begin = rows.at + first * rows.at_stride
        here = filled[begin * item_nbytes : (begin + count * rows.at_stride) * item_nbytes].reshape(count, -1)
        for each in rows.columns:
            of_row = slice((each.start - low) * item_nbytes, (each.start - low + each.numel) * item_nbytes)
            here[:, each.at * item_nbytes : (each.at + each.numel) * item_nbytes] = there[:, of_row]
