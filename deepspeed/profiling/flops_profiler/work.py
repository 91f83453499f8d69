"""What an operator costs, as numbers: multiply-accumulates, and operations that are none.

Lives here: the record and its sum. Does not live here: the formulas (`products`, `elementwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Formula", "Work", "first_tensor", "numel_of"]


class Work(NamedTuple):
    """What one call of an operator does. One multiply-accumulate is two FLOPs (docs/adr/0020)."""

    macs: int = 0
    """Multiply-accumulates of products: matrices, convolutions, attention."""
    others: int = 0
    """FLOPs that are no part of such a product."""
    again: tuple[int, int] = (0, 0)
    """(macs, others) that a kernel of backward spends on what forward had computed already; not in the two above."""

    @property
    def flops(self) -> int:
        """All but what is computed again."""
        return 2 * self.macs + self.others

    def times(self, factor: int) -> Work:
        """The same, `factor` times over."""
        return Work(self.macs * factor, self.others * factor, (self.again[0] * factor, self.again[1] * factor))


Formula = Callable[[Sequence[Any], Mapping[str, Any], Any], Work]
"""`formula(args, kwargs, result)` of one call; only shapes and dtypes of tensors are looked at."""


def first_tensor(values: Any) -> Tensor | None:
    """The tensor itself, or the first in a tuple or list; None where there is none."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, (tuple, list)):
        return next((value for value in values if isinstance(value, Tensor)), None)
    return None


def numel_of(values: Any) -> int:
    """Elements of `first_tensor`; 0 where there is none."""
    tensor = first_tensor(values)
    return 0 if tensor is None else tensor.numel()
