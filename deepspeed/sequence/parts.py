"""Tensors between their two forms: a part of the sequence with all heads, and the whole sequence with a part of the heads.

    to_heads      (.., L_r, .., H, ..) -> (.., T, .., H_r, ..)       several tensors in one exchange; backward is to_sequence
    to_sequence   (.., T, .., H_r, ..) -> (.., L_r, .., H, ..)       backward is to_heads

`L_r` = this rank's tokens, `T` = tokens of the whole sequence, `H` = heads, `H_r` = this rank's heads. Heads may go to
several ranks (key and value heads that those share): on the way back what comes from them is added.

Lives here: the two directions with gradients. Does not live here: which heads and tokens (`sequence.exchange`), what carries
them (`comm.parts`). Called by `sequence.layer` and `sequence.hugging_face`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed import comm
from deepspeed.comm.algorithms import parts_exchanger
from deepspeed.comm.parts import part_nbytes
from deepspeed.sequence.exchange import Lengths

__all__ = ["Route", "gathered_integers", "to_heads", "to_sequence"]


@dataclass(frozen=True)
class Route:
    """Where the heads and tokens of some tensors go; the same on all ranks but for `rank`."""

    group: comm.ProcessGroup | None
    rank: int
    lengths: Lengths
    heads: tuple[tuple[range, ...], ...]
    """For each tensor, for each rank: its heads."""
    sequence_dim: int
    head_dim: int

    def shape(self, like: Tensor, length: int, heads: int) -> tuple[int, ...]:
        """Shape of a tensor with that many tokens and heads."""
        shape = list(like.shape)
        shape[self.sequence_dim], shape[self.head_dim] = length, heads
        return tuple(shape)

    def largest_nbytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of the largest part between two ranks."""
        itemsizes = [tensor.itemsize for tensor in tensors]
        longest = max(self.lengths.tokens)
        counts = {tuple(len(ranges[rank]) for ranges in self.heads) for rank in range(len(self.lengths.tokens))}
        return max(
            part_nbytes([self.shape(tensor, longest, each) for tensor, each in zip(tensors, heads, strict=True)], itemsizes)
            for heads in counts
        )

    @cached_property
    def are_shared(self) -> list[bool]:
        """For each tensor: whether some head of it goes to several ranks."""
        return [sum(map(len, ranges)) > len({head for heads in ranges for head in heads}) for ranges in self.heads]


def to_heads(route: Route, *tensors: Tensor) -> list[Tensor]:
    """Return each tensor with the whole sequence and this rank's heads, contiguous. Every rank of the group must call it.

    Raises:
        CommError: a rank is gone or late, or its tensors have other sizes than the route says.
    """
    return list(_ToHeads.apply(route, *tensors))  # type: ignore[no-untyped-call]


def to_sequence(route: Route, *tensors: Tensor) -> list[Tensor]:
    """Return each tensor with this rank's tokens and all heads, contiguous. Every rank of the group must call it."""
    return list(_ToSequence.apply(route, *tensors))  # type: ignore[no-untyped-call]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        return _heads_of(route, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_sequence_of(ctx.route, gradients)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        return _sequence_of(route, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_heads_of(ctx.route, gradients)


def _heads_of(route: Route, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    tokens, rank = route.lengths.tokens, route.rank
    leaving = [
        [_heads(tensor, route.head_dim, ranges[peer]) for tensor, ranges in zip(tensors, route.heads, strict=True)]
        for peer in range(len(tokens))
    ]
    own = [len(ranges[rank]) for ranges in route.heads]
    arriving = [[route.shape(each, length, heads) for each, heads in zip(tensors, own, strict=True)] for length in tokens]
    arrived = parts_exchanger(route.group, tensors[0].device).exchange(leaving, arriving, route.largest_nbytes(tensors))
    whole = [
        tensor.new_empty(route.shape(tensor, route.lengths.total, heads)) for tensor, heads in zip(tensors, own, strict=True)
    ]
    for peer, part in arrived:
        for target, source in zip(whole, part, strict=True):
            target.narrow(route.sequence_dim, route.lengths.starts[peer], tokens[peer]).copy_(source)
    return tuple(whole)


def _sequence_of(route: Route, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    tokens, rank, dim = route.lengths.tokens, route.rank, route.sequence_dim
    leaving = [
        [tensor.narrow(dim, start, length) for tensor in tensors]
        for start, length in zip(route.lengths.starts, tokens, strict=True)
    ]
    arriving = [
        [route.shape(tensor, tokens[rank], len(ranges[peer])) for tensor, ranges in zip(tensors, route.heads, strict=True)]
        for peer in range(len(tokens))
    ]
    arrived = parts_exchanger(route.group, tensors[0].device).exchange(leaving, arriving, route.largest_nbytes(tensors))
    parts = []
    for tensor, ranges, is_shared in zip(tensors, route.heads, route.are_shared, strict=True):
        shape = route.shape(tensor, tokens[rank], max(heads.stop for heads in ranges))
        parts.append(tensor.new_zeros(shape) if is_shared else tensor.new_empty(shape))
    for peer, part in arrived:
        for target, source, ranges, is_shared in zip(parts, part, route.heads, route.are_shared, strict=True):
            place = _heads(target, route.head_dim, ranges[peer])
            place.add_(source) if is_shared else place.copy_(source)
    return tuple(parts)


def _heads(tensor: Tensor, dim: int, heads: range) -> Tensor:
    return tensor.narrow(dim, heads.start, len(heads))


def gathered_integers(values: Sequence[int], group: comm.ProcessGroup | None, device: torch.device) -> list[list[int]]:
    """Every rank's integers, in the order of ranks: equally many on all. Every rank of the group must call it."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(comm.get_world_size(group))]
    comm.all_gather(everyone, mine, group)
    return [each.tolist() for each in everyone]
