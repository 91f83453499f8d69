"""Global tensors out of pieces that lie in many files, read by range.

    rank 0's file   |emb.weight      |fc1.wei|           Pieces: one after another
    rank 1's file   |ght|fc1.bias|...|

    tensor rank 0   [out, in/2] --.   Joined: side by side along a dimension, in sections
    tensor rank 1   [out, in/2] --+-> [out, in]

Every kind is a `FlatValues`: elements of a flattened tensor on request, so nothing is put together before it is read, and
kinds nest. Does not live here: which pieces make a tensor (`slices`, `tensor_parallel`, `universal`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepspeed.checkpoint.disk.range_check import prepare_out, unknown_tensor

__all__ = ["FlatValues", "Joined", "Mean", "Pieces", "Section", "Stored", "TensorTable"]

_STAGING_NUMEL = 1 << 22


class FlatValues(Protocol):
    """The elements of one flattened tensor."""

    numel: int

    def read(self, start: int, out: Tensor) -> None:
        """Fill the flat `out` (any dtype and device) with the elements from `start` on; the caller checked the range."""


class Pieces:
    """Elements that lie in flat tensors, one after another."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
        self._starts = [0, *accumulate(tensor.numel() for tensor in self._tensors)]
        self.numel = self._starts[-1]

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the elements from `start` on."""
        at, number = 0, bisect_right(self._starts, start) - 1
        while at < out.numel():
            offset = start + at - self._starts[number]
            length = min(self._tensors[number].numel() - offset, out.numel() - at)
            out.detach()[at : at + length].copy_(self._tensors[number][offset : offset + length])
            at, number = at + length, number + 1


class Section(NamedTuple):
    """Columns `[start, start + width)` of part `part`."""

    part: int
    start: int
    width: int


class Joined:
    """Parts side by side: every row of the whole is made of sections of the parts' rows, in order.

    Seen along the dimension of joining, a tensor of shape `(..., k, ...)` has `rows` rows of `k` times the elements behind.
    """

    def __init__(self, parts: Sequence[FlatValues], sections: Sequence[Section], rows: int) -> None:
        self._parts, self._sections, self._rows = parts, sections, rows
        self._row_numel = sum(section.width for section in sections)
        self.numel = rows * self._row_numel

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the elements from `start` on."""
        at = 0
        while at < out.numel():
            row, column = divmod(start + at, self._row_numel)
            if self._row_numel > _STAGING_NUMEL:
                at += self._read_in_row(row, column, out.detach()[at:])
                continue
            wanted = column + out.numel() - at
            count = min(-(-wanted // self._row_numel), max(1, _STAGING_NUMEL // self._row_numel))
            block = self._rows_of(row, count, out.dtype).flatten()[column:][: out.numel() - at]
            out.detach()[at : at + block.numel()].copy_(block)
            at += block.numel()

    def _rows_of(self, row: int, count: int, dtype: torch.dtype) -> Tensor:
        block = torch.empty(count, self._row_numel, dtype=dtype)
        widths = [part.numel // self._rows for part in self._parts]
        rows_of_part: dict[int, Tensor] = {}
        at = 0
        for part, start, width in self._sections:
            if part not in rows_of_part:
                rows_of_part[part] = torch.empty(count * widths[part], dtype=dtype)
                self._parts[part].read(row * widths[part], rows_of_part[part])
            block[:, at : at + width].copy_(rows_of_part[part].view(count, -1)[:, start : start + width])
            at += width
        return block

    def _read_in_row(self, row: int, column: int, out: Tensor) -> int:
        """Fill the beginning of `out` from one section of a very long row; return how much."""
        for part, start, width in self._sections:
            if column < width:
                length = min(width - column, out.numel())
                of_part = self._parts[part].numel // self._rows
                self._parts[part].read(row * of_part + start + column, out[:length])
                return length
            column -= width
        raise AssertionError("a column lies in one of the sections: they make up the row")


class Mean:
    """The average of parts of one shape, taken in fp32."""

    def __init__(self, parts: Sequence[FlatValues]) -> None:
        self._parts = parts
        self.numel = parts[0].numel

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the averages from `start` on."""
        total = torch.zeros(out.numel(), dtype=torch.float32)
        values = torch.empty_like(total)
        for part in self._parts:
            part.read(start, values)
            total += values
        out.detach().copy_(total / len(self._parts))


class Stored(NamedTuple):
    """One global tensor; `values` may have more elements than the shape (padding behind them)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: FlatValues

    @property
    def numel(self) -> int:
        """Elements of the shape."""
        return torch.Size(self.shape).numel()


class TensorTable:
    """Global tensors by name: the tensor half of a `CheckpointSource`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Stored] = {}

    def add(self, name: str, tensor: Stored) -> None:
        """Put a tensor in; one of the same name is replaced."""
        self._tensors[name] = tensor

    def names(self, prefix: str = "") -> list[str]:
        """Names of all tensors that start with `prefix`, sorted."""
        return sorted(name for name in self._tensors if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor on the disk."""
        return self._find(name).dtype

    def read(self, name: str, start: int = 0, length: int | None = None, out: Tensor | None = None) -> Tensor:
        """Read a range of the flattened tensor; see `CheckpointSource.read`."""
        tensor = self._find(name)
        out = prepare_out(name, tensor.numel, tensor.dtype, start, length, out)
        if out.numel():
            tensor.values.read(start, out)
        return out

    def _find(self, name: str) -> Stored:
        if name not in self._tensors:
            raise unknown_tensor(self._folder, name, self._tensors)
        return self._tensors[name]
