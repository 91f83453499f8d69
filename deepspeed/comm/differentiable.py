"""Collectives that a gradient flows through: what ranks hold in common becomes parts, and parts come together again.

                       forward                             backward
    copy               x                                   all-reduce     every rank uses x for another part of the result
    reduce             all-reduce                          x              every rank has one term of the sum
    split              this rank's part along a dim        all-gather     the gradient of what is whole is alike on all ranks
    gather             all-gather along a dim              this rank's part
    reduce_scatter     sum, this rank's part along a dim   all-gather     the gradient of what is whole differs by rank
    all_gather         all-gather along a dim              sum, this rank's part

Each pair is the other's transpose, so a gradient may be differentiated again. `gather` and `all_gather` differ in backward
alone: after `gather` all ranks compute the same with the result, after `all_gather` each computes something of its own.

Lives here: the six, over one process group. Does not live here: layers that hide them behind a product
(`tensor_parallel.layers`). Parts may have different widths, 0 among them; then all ranks are told all widths. Over one rank
each returns what it was given. Source: Megatron-LM (arXiv:1909.08053), section 3; sequence parts: arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm import collectives
from deepspeed.comm.sums import all_reduce_now
from deepspeed.errors import ArgumentError

__all__ = ["all_gather", "copy", "gather", "own_part", "reduce", "reduce_scatter", "split"]

Group = dist.ProcessGroup | None
Widths = tuple[int, ...] | None


def copy(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`, which is alike on all ranks; its gradient is the sum of theirs. Collective in backward."""
    if dist.get_world_size(group) == 1:
        return x
    return _tensor(_Copy.apply(x, group))  # type: ignore[no-untyped-call]


def reduce(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of all ranks' `x`, of one shape. Collective in forward."""
    if dist.get_world_size(group) == 1:
        return x
    return _tensor(_Reduce.apply(x, group))  # type: ignore[no-untyped-call]


def split(whole: Tensor, dim: int, group: Group = None, widths: Sequence[int] | None = None) -> Tensor:
    """Return this rank's part along `dim` of what is alike on all ranks. Collective in backward.

    Args:
        whole: the same on every rank.
        dim: negative counts from the end.
        group: whose ranks share it.
        widths: of each rank's part, in group order; None: equal ones.

    Raises:
        ArgumentError: the widths do not add up to the size along `dim`, or the ranks do not divide it.
    """
    if dist.get_world_size(group) == 1:
        return whole
    return _tensor(_Split.apply(whole, dim, group, _all_widths(whole.shape[dim], dim, group, widths)))  # type: ignore[no-untyped-call]


def gather(part: Tensor, dim: int, group: Group = None, widths: Sequence[int] | None = None) -> Tensor:
    """Return all ranks' parts side by side along `dim`, for ranks that go on alike. Collective in forward.

    Arguments as for `split`; without `widths` the parts have one shape.
    """
    if dist.get_world_size(group) == 1:
        return part
    return _tensor(_Gather.apply(part, dim, group, _own_widths(part, dim, group, widths)))  # type: ignore[no-untyped-call]


def reduce_scatter(x: Tensor, dim: int, group: Group = None, widths: Sequence[int] | None = None) -> Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' `x`. Collective in forward and backward.

    Arguments and errors as for `split`.
    """
    if dist.get_world_size(group) == 1:
        return x
    return _tensor(_ReduceScatter.apply(x, dim, group, _all_widths(x.shape[dim], dim, group, widths)))  # type: ignore[no-untyped-call]


def all_gather(part: Tensor, dim: int, group: Group = None, widths: Sequence[int] | None = None) -> Tensor:
    """Return all ranks' parts side by side along `dim`, for ranks that each use them differently. Collective both ways.

    Arguments as for `gather`.
    """
    if dist.get_world_size(group) == 1:
        return part
    return _tensor(_AllGather.apply(part, dim, group, _own_widths(part, dim, group, widths)))  # type: ignore[no-untyped-call]


def own_part(whole: Tensor, dim: int, rank: int, widths: Sequence[int]) -> Tensor:
    """A view of group rank `rank`'s part along `dim`."""
    return whole.narrow(dim, sum(widths[:rank]), widths[rank])


# -- the six, each with its transpose for a gradient ---------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Reduce.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_now(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Copy.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: Group, widths: tuple[int, ...]) -> Tensor:
        ctx.given = dim, group, widths
        return _own_copy(whole, dim, group, widths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Gather.apply(gradient, *ctx.given), None, None, None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Group, widths: tuple[int, ...]) -> Tensor:
        ctx.given = dim, group, widths
        return _gathered(part, dim, group, widths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Split.apply(gradient, *ctx.given), None, None, None  # type: ignore[no-untyped-call]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group, widths: tuple[int, ...]) -> Tensor:
        ctx.given = dim, group, widths
        return _reduce_scattered(x, dim, group, widths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllGather.apply(gradient, *ctx.given), None, None, None  # type: ignore[no-untyped-call]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Group, widths: tuple[int, ...]) -> Tensor:
        ctx.given = dim, group, widths
        return _gathered(part, dim, group, widths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _ReduceScatter.apply(gradient, *ctx.given), None, None, None  # type: ignore[no-untyped-call]


# -- moving -----------------------------------------------------------------------------------------------------------


def _own_copy(whole: Tensor, dim: int, group: Group, widths: tuple[int, ...]) -> Tensor:
    return own_part(whole, dim, dist.get_rank(group), widths).clone(memory_format=torch.contiguous_format)


def _gathered(part: Tensor, dim: int, group: Group, widths: tuple[int, ...]) -> Tensor:
    """Parts that are narrower than the widest travel padded: back ends want one shape."""
    padded = _padded(part, dim, max(widths))
    parts = [torch.empty_like(padded) for _ in widths]
    if padded.numel():
        collectives.all_gather(parts, padded, group=group)
    return torch.cat([each.narrow(dim, 0, width) for each, width in zip(parts, widths, strict=True)], dim)


def _reduce_scattered(x: Tensor, dim: int, group: Group, widths: tuple[int, ...]) -> Tensor:
    rank = dist.get_rank(group)
    parts = [_padded(own_part(x, dim, other, widths), dim, max(widths)) for other in range(len(widths))]
    total = torch.empty_like(parts[0])
    if total.numel():
        collectives.reduce_scatter(total, parts, group=group)
    return total.narrow(dim, 0, widths[rank]).contiguous()


def _padded(part: Tensor, dim: int, width: int) -> Tensor:
    if part.shape[dim] == width:
        return part.contiguous()
    shape = list(part.shape)
    shape[dim] = width
    padded = part.new_zeros(shape)
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def _all_widths(whole: int, dim: int, group: Group, widths: Sequence[int] | None) -> tuple[int, ...]:
    """The widths of all parts of a dimension of `whole` elements."""
    size = dist.get_world_size(group)
    if widths is None:
        if whole % size:
            raise ArgumentError(
                f"dimension {dim} has {whole} elements, which {size} ranks do not divide. Give the widths of their parts."
            )
        return (whole // size,) * size
    if len(widths) != size or sum(widths) != whole:
        raise ArgumentError(
            f"widths {tuple(widths)} of the parts of {size} ranks, of dimension {dim} with {whole} elements: give one for "
            "each rank, which add up to it."
        )
    return tuple(widths)


def _own_widths(part: Tensor, dim: int, group: Group, widths: Sequence[int] | None) -> tuple[int, ...]:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if widths is None:
        return (part.shape[dim],) * size
    if len(widths) != size or widths[rank] != part.shape[dim]:
        raise ArgumentError(
            f"widths {tuple(widths)} of the parts of {size} ranks, but group rank {rank} has {part.shape[dim]} elements "
            f"along dimension {dim}: give the width of each rank's part, this one's at its place."
        )
    return tuple(widths)


def _tensor(made: Any) -> Tensor:
    assert isinstance(made, Tensor)  # what a function of one tensor returns
    return made
