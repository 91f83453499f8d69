"""Slices of tensor-parallel ranks that say themselves where their elements belong: the `affine_map` of automatic tensor
parallelism, version 1.

    whole (logical_shape, flat)   source [offset, strides]  <-- shape -->  dest [offset, strides]   shard of a rank (flat)

Every piece is a block of `shape` that lies strided in the whole tensor and strided in the shard of each rank in `locations`.
Called by `tensor_parallel`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.checkpoint.original.reading.assembled import FlatValues, Stored
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = ["AffineMap"]

_VERSION = 1


class _Strided(NamedTuple):
    offset: int
    strides: tuple[int, ...]


class _Piece(NamedTuple):
    rank: int
    shape: tuple[int, ...]
    source: _Strided
    dest: _Strided


class AffineMap:
    """Where the slices of one checkpoint belong.

    Args:
        stated: its `affine_map`.

    Raises:
        CheckpointError: of a version that is not known.
    """

    def __init__(self, stated: Mapping[str, Any]) -> None:
        if stated.get("version") != _VERSION:
            raise CheckpointError(f"its affine_map has version {stated.get('version')!r}; known is version {_VERSION}")
        self._params: Mapping[str, Any] = stated["params"]
        self._last: tuple[object, Tensor] | None = None

    def join(self, name: str, slices: Sequence[Stored]) -> Stored | None:
        """The whole tensor; None where the map does not name it.

        Raises:
            CheckpointDamagedError: the slices do not have the shapes that the map states, or do not make up the whole.
        """
        entry = next((entry for pattern, entry in self._params.items() if re.match(pattern, name)), None)
        if entry is None:
            return None
        shape = tuple(int(size) for size in entry["logical_shape"])
        pieces = list(_pieces_of(entry["ranks"]))
        stated = [tuple(entry["ranks"][rank]["shard_shape"]) for rank in sorted(entry["ranks"])]
        if stated != [s.shape for s in slices] or sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
            raise CheckpointDamagedError(
                f"the slices of {name!r} do not have the shapes that its affine_map states: {stated}."
            )
        return Stored(
            shape, slices[0].dtype, _Affine([s.values for s in slices], pieces, math.prod(shape), slices[0].dtype, self)
        )

    def whole(self, values: _Affine) -> Tensor:
        """The whole tensor of `values`, kept until another is asked for: ranges of one are read one after another."""
        if self._last is None or self._last[0] is not values:
            self._last = (values, values.build())
        return self._last[1]


class _Affine:
    """A tensor made of strided pieces of slices."""

    def __init__(
        self, parts: Sequence[FlatValues], pieces: Sequence[_Piece], numel: int, dtype: torch.dtype, owner: AffineMap
    ) -> None:
        self._parts, self._pieces, self._dtype, self._owner = parts, pieces, dtype, owner
        self.numel = numel

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the elements from `start` on."""
        out.detach().copy_(self._owner.whole(self)[start : start + out.numel()])

    def build(self) -> Tensor:
        """Put the whole tensor together."""
        whole = torch.empty(self.numel, dtype=self._dtype)
        for rank, part in enumerate(self._parts):
            shard = torch.empty(part.numel, dtype=self._dtype)
            part.read(0, shard)
            for _, shape, source, dest in (piece for piece in self._pieces if piece.rank == rank):
                block = shard.as_strided(shape, dest.strides, dest.offset)
                whole.as_strided(shape, source.strides, source.offset).copy_(block)
        return whole


def _pieces_of(ranks: Mapping[int, Any]) -> list[_Piece]:
    """Every piece once: where several ranks hold it, from the first of them."""
    return [
        _Piece(rank, tuple(piece["shape"]), _strided(piece["source"]), _strided(piece["dest"]))
        for rank, shard in sorted(ranks.items())
        for piece in shard["pieces"]
        if min(piece["locations"]) == rank
    ]


def _strided(stated: Sequence[Any]) -> _Strided:
    return _Strided(int(stated[0]), tuple(int(stride) for stride in stated[1]))
