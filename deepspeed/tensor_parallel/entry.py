"""Where columns that take the same input take it from: their gradients of it are summed over ranks once, together.

    q_proj(x)  --+                       backward:  dx of q + dx of k + dx of v  ->  one all-reduce
    k_proj(x)  --+-- Entry: one copy of x
    v_proj(x)  --+                       overlapped:  the all-reduce goes on while weight gradients are computed

The first column to see an input makes the copy whose backward is the all-reduce; the next ones, if they are given the same
tensor, get the same copy, and autograd adds their gradients up before it. A column that is given another tensor begins anew.

[Note: weight gradients wait] With `tp_overlap_comm` a column's backward only computes the gradient of its input and puts
the other one aside; the copy's backward starts the all-reduce, makes the weight gradients meanwhile, and hands them out: the
copy has the weights as inputs, so autograd accumulates them as ever.

Called by `layers`. Source: Megatron-LM (arXiv:1909.08053), section 3; the overlap as in its linear layer.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.comm import differentiable
from deepspeed.comm.sums import start_all_reduce
from deepspeed.topology.mesh import AxisGroup

__all__ = ["Column", "Entry", "OverlappedEntry", "PlainEntry"]


class Column(Protocol):
    """What an entry asks of a layer."""

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return this rank's outputs' weight (outputs, in) and bias, as the product uses them."""


class Entry:
    """Of the columns of one block that may take one input."""

    def __init__(self, axis: AxisGroup) -> None:
        """Store the axis; columns are added by whoever cuts them."""
        self.columns: list[Column] = []
        self._axis = axis
        self._source: Tensor | None = None
        self._copied: Tensor | None = None
        self._aside: list[tuple[Column, Tensor]] = []
        self._version = self._left = 0

    def product(self, column: Column, x: Tensor) -> Tensor:
        """Return x W^T + b for one column; x is alike on all ranks."""
        weight, bias = column.weight_and_bias()
        if torch.is_grad_enabled() and x.requires_grad:
            x = self._enter(x, lambda: differentiable.copy(x, self._axis.group))[0]
        return F.linear(x, weight, bias)

    def _enter(self, x: Tensor, made: Any) -> tuple[Tensor, list[tuple[Column, Tensor]]]:
        """The copy of x for one more column, and what is put aside with it."""
        if self._source is not x or self._version != x._version:
            self._source, self._version, self._left, self._aside = x, x._version, len(self.columns), []
            self._copied = made()
        copied, aside = self._copied, self._aside
        assert copied is not None  # made above, or for the column before
        self._left -= 1
        if not self._left:
            self._forget()  # else the activation would live until the next step
        return copied, aside

    def _forget(self) -> None:
        self._source = self._copied = None
        self._aside = []
        self._version = self._left = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Entry:
        """One for the copies of its columns, without the tensors of a forward."""
        memo[id(self)] = made = type(self)(self._axis)
        made.columns = deepcopy(self.columns, memo)
        return made


class PlainEntry(Entry):
    """Of a column whose input comes from an all-gather, which sums the gradients itself (`token_parts`)."""

    def __init__(self) -> None:
        """It has no axis."""
        self.columns = []

    def product(self, column: Column, x: Tensor) -> Tensor:
        """See `Entry`."""
        return F.linear(x, *column.weight_and_bias())

    def __deepcopy__(self, memo: dict[int, object]) -> PlainEntry:
        """Another one: it holds nothing."""
        return PlainEntry()


class OverlappedEntry(Entry):
    """The same, with the all-reduce going on while weight gradients are computed; under autocast it is as plain.

    There are no second derivatives: asking for them is an error.
    """

    def product(self, column: Column, x: Tensor) -> Tensor:
        """See `Entry`."""
        if not (torch.is_grad_enabled() and x.requires_grad) or torch.is_autocast_enabled(x.device.type):
            return super().product(column, x)
        copied, aside = self._enter(x, lambda: self._copy_with_weights(x))
        weight, bias = column.weight_and_bias()
        detached = None if bias is None else bias.detach()
        product: Tensor = _Product.apply(copied, weight.detach(), detached, column, aside)  # type: ignore[no-untyped-call]
        return product

    def _copy_with_weights(self, x: Tensor) -> Tensor:
        pairs = [column.weight_and_bias() for column in self.columns]
        weights = [each for pair in pairs for each in pair]
        copied: Tensor = _CopyWithWeights.apply(x, self._axis, self.columns, self._aside, *weights)  # type: ignore[no-untyped-call]
        return copied


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, column: Column, aside: list[Any]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.given = column, aside
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (weight,) = ctx.saved_tensors
        column, aside = ctx.given
        aside.append((column, gradient))
        return gradient @ weight, None, None, None, None


class _CopyWithWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: AxisGroup, columns: list[Column], aside: list[Any], *weights: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.given = axis, columns, aside
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        axis, columns, aside = ctx.given
        total = gradient.contiguous()
        work = start_all_reduce(total, axis.group)
        made: list[Tensor | None] = [None] * (2 * len(columns))
        needed = ctx.needs_input_grad[4:]
        x_TM = _rows(x)
        for column, output in aside:
            at = 2 * next(place for place, each in enumerate(columns) if each is column)
            output_TN = _rows(output)
            if needed[at]:
                made[at] = _added(made[at], output_TN.t() @ x_TM)
            if needed[at + 1]:
                made[at + 1] = _added(made[at + 1], output_TN.sum(0))
        aside.clear()
        work.wait()
        return total, None, None, None, *made


def _rows(x: Tensor) -> Tensor:
    """Of x (..., width), one row for each token; the width may be 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _added(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other
