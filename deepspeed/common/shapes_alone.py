"""Tensors that have shapes and no values: on the meta device, or torch's fake ones, as a plan traces with.

Code that needs a number from a tensor asks here first, and takes what is usual where there is none. Called by `moe`.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["even_counts", "has_values", "is_plain"]


def has_values(tensor: Tensor) -> bool:
    """Whether there is something to read."""
    return not (tensor.is_meta or hasattr(tensor, "fake_mode"))


def is_plain(tensor: object) -> bool:
    """Whether it is a tensor of no class of its own; torch's fake ones stand for those."""
    return type(tensor) is Tensor or hasattr(tensor, "fake_mode")


def even_counts(total: int, parts: int) -> list[int]:
    """`total` things over `parts` as evenly as can be, the first ones getting one more."""
    least, more = divmod(total, parts)
    return [least + (part < more) for part in range(parts)]
