"""The unit of a save: some elements of one tensor, from one rank.

Made by the engine, described to rank 0 (`description`), copied (`snapshot`), written (`writer`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepspeed.common.deferred import DeferredTensor
from deepspeed.sharding.cut import Cut

__all__ = ["Piece"]


@dataclass(frozen=True)
class Piece:
    """Elements `[start, start + data.numel())` of the flattened global tensor `name`, to be written by this rank.

    Where ranks hold the tensor in parts (`cut`), `start` counts in stored order: the parts one after another, flattened.
    `data` may have any shape, strides and device; its elements are taken in row-major order. Only they are written, not the
    storage that it may be a view of. A deferred one is read when it is written, or copied. An empty piece of a tensor that
    has elements is allowed and writes nothing.
    """

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, equal on all ranks."""

    start: int
    data: Tensor | DeferredTensor
    cut: Cut | None = None
    """How ranks hold the tensor, equal on all ranks; None: whole. One that `is_in_order` makes no difference."""

    is_private: bool = False
    """Nothing but updates and this library's own calls writes `data`, and they ask first (`Saver.before_change`): a copy may
    still go on when the caller computes again."""

    @classmethod
    def whole(cls, name: str, data: Tensor) -> Piece:
        """A tensor that this rank writes all of."""
        return cls(name, tuple(data.shape), 0, data)
