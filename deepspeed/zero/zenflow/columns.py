"""Which columns of each matrix are important, and where their elements lie in a rank's shards.

    matrix (R, C)         flattened, cut by shards        sums of squares         the k largest       elements in this shard
    c0 c1 c2 c3           |c0 c1 c2 c3 c0 c1|c2 c3 ..|    per column, added   ->  columns 1, 3    ->  1, 3, 5 | 1, 3, ..
    c0 c1 c2 c3           |-- rank 0 -------|- rank 1     over the ranks

A column is what one input channel feeds: dimension 1 of a weight (of the flattened rest, for more than two dimensions).
Everything with fewer than two dimensions is important as a whole. All ranks choose alike: all see the same sums.

Lives here: the choice. Does not live here: when (`zero.zenflow.schedule`), what becomes of it (`zero.zenflow.weights`).

Source: ZenFlow (arXiv:2505.12242), which chooses input channels by the sum of squares of their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.sharding import Fragment
from deepspeed.zero.flat import FlatGroup

__all__ = ["Columns", "column_squares", "important_columns", "kept_count", "positions_of"]


def kept_count(columns: int, ratio: float) -> int:
    """How many of `columns` are important: at least one, at most all."""
    return min(columns, max(1, math.floor(columns * ratio + 0.5)))


def column_squares(part: Tensor, first: int, columns: int) -> Tensor:
    """Sum of squares of each column, of the elements `[first, first + len(part))` of a flattened matrix.

    Args:
        part: 1-D, any float dtype.
        first: where it begins in the matrix.
        columns: of the matrix.

    Returns:
        fp64, shape (columns,); columns without an element in `part` give 0.
    """
    squares = torch.zeros(columns, dtype=torch.float64, device=part.device)
    head = min(-first % columns, part.numel())
    whole = (part.numel() - head) // columns * columns
    if head:
        start = first % columns
        squares[start : start + head] += part[:head].double().square()
    if whole:
        rows = part[head : head + whole].view(-1, columns)
        squares += torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64).square()
    tail = part[head + whole :]
    squares[: tail.numel()] += tail.double().square()
    return squares


def important_columns(squares: Tensor, ratio: float) -> Tensor:
    """Numbers of the important columns, rising; of equal ones the first. `squares` has one number per column."""
    order = torch.sort(squares, descending=True, stable=True).indices
    return order[: kept_count(squares.numel(), ratio)].sort().values


def positions_of(chosen: Tensor, columns: int, first: int, numel: int) -> Tensor:
    """Where the elements of the `chosen` columns lie in `[first, first + numel)` of a flattened matrix, from its `first` on.

    Returns:
        int64, rising.
    """
    rows = torch.arange(first // columns, -(-(first + numel) // columns), device=chosen.device)
    places = (rows[:, None] * columns + chosen[None, :]).view(-1) - first
    return places[(places >= 0) & (places < numel)]


@dataclass(frozen=True)
class _Matrix:
    """A parameter of two or more dimensions, and where its columns stand among all columns."""

    flat: FlatGroup
    position: int
    columns: int
    start: int


class Columns:
    """The columns of all matrices of some flat groups. The same on all ranks of the shard axis."""

    def __init__(self, flats: Sequence[FlatGroup], ratio: float) -> None:
        self._ratio = ratio
        self._flats = tuple(flats)
        self._matrices: dict[tuple[int, int], _Matrix] = {}
        """By number of the flat group, and index among its members."""

        self._numel = 0
        for number, flat in enumerate(flats):
            for position, slot in enumerate(flat.layout.slots):
                shape = flat.shapes[slot.index]
                if len(shape) > 1 and slot.numel:
                    columns = slot.numel // shape[0]
                    self._matrices[number, slot.index] = _Matrix(flat, position, columns, self._numel)
                    self._numel += columns

    @property
    def numels(self) -> tuple[int, int]:
        """Elements of all matrices over all ranks: of the columns that are not important, and of those that are."""
        rows = {key: m.flat.shapes[key[1]][0] for key, m in self._matrices.items()}
        important = sum(rows[key] * kept_count(m.columns, self._ratio) for key, m in self._matrices.items())
        return sum(rows[key] * m.columns for key, m in self._matrices.items()) - important, important

    def choose(self) -> list[Tensor]:
        """Positions of the important elements in this rank's shard space of each flat group (int64, rising).

        From the gradients as they are now. Collective over the shard axis.
        """
        chosen = self._chosen(self._squares())
        return [self._positions(number, chosen) for number in range(len(self._flats))]

    def of_matrices(self, number: int, start: int, stop: int) -> Iterator[Fragment]:
        """The parts of matrices in `[start, stop)` of this rank's shard space of flat group `number`."""
        for f in self._flats[number].own_fragments(start, stop):
            if (number, f.index) in self._matrices:
                yield f

    def _squares(self) -> Tensor:
        device = self._flats[0].device if self._flats else torch.device("cpu")
        squares = torch.zeros(self._numel, dtype=torch.float64, device=device)
        for number, flat in enumerate(self._flats):
            for f in self.of_matrices(number, 0, flat.layout.shard_numel):
                matrix = self._matrices[number, f.index]
                part = flat.gradients.shard(f.buffer_start, f.buffer_start + f.numel)
                found = column_squares(part, f.param_start, matrix.columns)
                squares[matrix.start : matrix.start + matrix.columns] += found.to(device)
        if self._flats and self._flats[0].axis.size > 1:
            comm.all_reduce(squares, group=self._flats[0].axis.group)
        return squares

    def _chosen(self, squares: Tensor) -> dict[tuple[int, int], Tensor]:
        return {
            key: important_columns(squares[m.start : m.start + m.columns], self._ratio) for key, m in self._matrices.items()
        }

    def _positions(self, number: int, chosen: dict[tuple[int, int], Tensor]) -> Tensor:
        found = []
        for f in self._flats[number].own_fragments():
            matrix = self._matrices.get((number, f.index))
            if matrix is None:
                places = torch.arange(f.numel)
            else:
                columns = chosen[number, f.index].cpu()
                places = positions_of(columns, matrix.columns, f.param_start, f.numel)
            found.append(places + f.buffer_start)
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
