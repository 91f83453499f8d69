"""`DistributedAttention`: Ulysses around any attention, and the all-to-all that it is made of.

    q, k, v   a part of the sequence, all heads
        |     one exchange
    q, k, v   the whole sequence, this rank's heads  -->  local attention  -->  context
                                                                                   |   one exchange
                                                  context, a part of the sequence, all heads

Shapes, by `batch_dim_idx`: 0 is (batch, tokens, heads, head size), 1 is (tokens, batch, heads, head size).

Source: DeepSpeed Ulysses (arXiv:2309.14509), section 3. Lives here: the layer and the free functions that clients call. Does
not live here: which heads and tokens go where (`sequence.exchange`), moving them (`sequence.parts`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm.algorithms import parts_exchanger
from deepspeed.common.compiling import not_compiled
from deepspeed.errors import ArgumentError
from deepspeed.sequence.exchange import HeadPlan, Lengths, even_part
from deepspeed.sequence.parts import Route, gathered_integers, to_heads, to_sequence

__all__ = [
    "DistributedAttention",
    "expanded_for",
    "register_all_to_all_group",
    "single_all_to_all",
    "uneven_heads_all2all",
]

_HEADS = 2


class DistributedAttention(nn.Module):
    """Attention over a sequence that lies in parts on the ranks of a group.

    Every rank calls it with its part. Heads need not divide over the ranks, and key and value heads may be fewer than ranks:
    ranks then get copies, whose gradients are added. Where query heads use the ones of a rank unequally often, those are
    repeated to one per query head before the local attention sees them.

    Args:
        local_attention: called as `f(query, key, value, *args, **kwargs)` on the whole sequence; returns the context
            with the sequence where the query has it, as (.., heads, size) or (.., heads * size).
        sequence_process_group: ranks that share a sequence; None means all.
        scatter_idx: where the heads are: 2.
        gather_idx: 0 or 1; `batch_dim_idx` of a call says where the tokens are.
        sp_stream: accepted, no effect: query, key and value travel together, on the current stream.
        num_kv_heads: accepted, no effect: key and value say how many heads they have.
        seq_length_is_variable: parts may differ in length between ranks; costs one small all-gather per call.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: comm.ProcessGroup | None,
        scatter_idx: int = _HEADS,
        gather_idx: int = 0,
        sp_stream: object = None,
        num_kv_heads: int | None = None,
        *,
        seq_length_is_variable: bool = False,
    ) -> None:
        super().__init__()
        if scatter_idx != _HEADS or gather_idx not in (0, 1):
            raise ArgumentError(
                f"DistributedAttention got scatter_idx={scatter_idx}, gather_idx={gather_idx}; needed 2 and 0 or 1: "
                "query, key and "
                "value are (batch, tokens, heads, size) or (tokens, batch, heads, size). Transpose them."
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.seq_length_is_variable = seq_length_is_variable

    @not_compiled
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the context of this rank's tokens: like `query`, or (.., heads * size) where the local attention merges
        them.

        Args:
            query: (batch, tokens, heads, size) or (tokens, batch, heads, size).
            key: the same with key and value heads.
            value: like `key`; its head size may differ.
            batch_dim_idx: 0 or 1: where the batch is.
            rotary_pos_emb: cosine and sine of the whole sequence, 4-D with the tokens in dimension 0 or 1, to rotate the
                first of the head size by; applied after the exchange.
            args: for the local attention, like `kwargs`.
            kwargs: for the local attention.

        Raises:
            ArgumentError: shapes that do not fit, or fewer query heads than ranks.
            CommError: other ranks are gone, late, or have other shapes.
        """
        plan = self._plan(query, key, value, batch_dim_idx)
        rank, length = comm.get_rank(self.spg), query.shape[1 - batch_dim_idx]
        if self.seq_length_is_variable:
            lengths = Lengths(tuple(each for (each,) in gathered_integers([length], self.spg, query.device)))
        else:
            lengths = Lengths.equal(length, plan.world_size)
        ranks = range(plan.world_size)
        queries, keys = tuple(map(plan.queries, ranks)), tuple(map(plan.keys, ranks))
        route = Route(self.spg, rank, lengths, (queries, keys, keys), 1 - batch_dim_idx, _HEADS)
        query, key, value = to_heads(route, query, key, value)
        if rotary_pos_emb is not None:
            query, key = (_rotated(each, rotary_pos_emb, batch_dim_idx) for each in (query, key))
        key, value = (expanded_for(plan, rank, each, _HEADS) for each in (key, value))
        context = self.local_attn(query, key, value, *args, **kwargs)
        back = Route(self.spg, rank, lengths, (queries,), 1 - batch_dim_idx, _HEADS)
        if context.dim() == query.dim():
            return to_sequence(back, context)[0]
        return to_sequence(back, context.view(*context.shape[:2], len(queries[rank]), -1))[0].flatten(-2)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedAttention:
        """A copy of its own that speaks to the same ranks: groups cannot be copied."""
        memo[id(self.spg)] = self.spg
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _plan(self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int) -> HeadPlan:
        shapes = [tuple(each.shape) for each in (query, key, value)]
        is_whole = all(len(shape) == 4 for shape in shapes)
        if (
            batch_dim_idx not in (0, 1)
            or not is_whole
            or len({shape[:2] for shape in shapes}) > 1
            or shapes[1][2] != shapes[2][2]
        ):
            raise ArgumentError(
                f"DistributedAttention got query, key and value of shapes {shapes}, batch_dim_idx={batch_dim_idx}; "
                "needed 4-D "
                "ones with the same batch and tokens, key and value with the same heads, and 0 or 1 for the batch."
            )
        return HeadPlan(query.shape[_HEADS], key.shape[_HEADS], comm.get_world_size(self.spg))


def expanded_for(plan: HeadPlan, rank: int, heads: Tensor, head_dim: int) -> Tensor:
    """Key or value heads of a rank, repeated to one per query head unless each serves equally many. Gradients are added.

    Args:
        plan: whose heads these are.
        rank: of this process in the group.
        heads: what `to_heads` brought.
        head_dim: where the heads are.
    """
    uses = plan.uses(rank)
    if len(set(uses)) == 1:
        return heads
    return heads.repeat_interleave(torch.tensor(uses, device=heads.device), dim=head_dim, output_size=sum(uses))


def _rotated(heads: Tensor, rotary: tuple[Tensor, Tensor], batch_dim_idx: int) -> Tensor:
    """Rotary position embedding of the first of the head size, the halves being the two coordinates (arXiv:2104.09864)."""
    tokens = heads.shape[1 - batch_dim_idx]
    turned = []
    for angle in rotary:
        if angle.dim() != 4 or tokens not in angle.shape[:2] or angle.shape[:2].numel() != tokens or angle.shape[2] != 1:
            raise ArgumentError(
                f"rotary_pos_emb of shape {tuple(angle.shape)} given; needed (tokens, 1, 1, size) with the {tokens} "
                "tokens of the "
                "whole sequence. Make cosine and sine for all ranks' tokens."
            )
        turned.append(angle.reshape((1, tokens, 1, -1) if batch_dim_idx == 0 else (tokens, 1, 1, -1)).to(heads.dtype))
    cosine, sine = turned
    size = cosine.shape[-1]
    part, rest = heads[..., :size], heads[..., size:]
    first, second = part.chunk(2, -1)
    return torch.cat([part * cosine + torch.cat([-second, first], -1) * sine, rest], -1)


# -- free functions ----------------------------------------------------------------------------------------------------


@not_compiled
def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: comm.ProcessGroup | None,
    async_op: bool = False,
    handle: object = None,
    type: object = None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """Exchange one tensor's sequence parts for heads (`scatter_idx` 2), or heads for sequence parts (0 or 1).
    Differentiable.

    Every rank of the group must call it. The tokens' dimension is `1 - batch_dim_idx`, whichever of 0 and 1 the other
    index is.

    Args:
        input: (batch, tokens, heads, size) or (tokens, batch, heads, size).
        scatter_idx: the dimension that is spread over ranks.
        gather_idx: the dimension that comes together.
        batch_dim_idx: 0 or 1.
        group: the ranks; None means all.
        async_op: accepted, no effect: the exchange is over when this returns; likewise `handle` and `type`.
        handle: see `async_op`.
        type: see `async_op`.
        num_kv_heads: given: heads do not divide over the ranks, as `uneven_heads_all2all`.

    Raises:
        ArgumentError: heads or tokens that do not divide over the ranks.
    """
    world_size = comm.get_world_size(group)
    if num_kv_heads is not None:
        return uneven_heads_all2all(input, scatter_idx, gather_idx, batch_dim_idx, group, num_kv_heads)
    sequence_dim = _sequence_dim(input, scatter_idx, gather_idx, batch_dim_idx)
    spread = input.shape[_HEADS if scatter_idx == _HEADS else sequence_dim]
    if spread % world_size:
        raise ArgumentError(
            f"single_all_to_all: dimension {scatter_idx} has {spread} elements, which {world_size} ranks do not divide. Use "
            "uneven_heads_all2all, which spreads them as evenly as possible, or DistributedAttention."
        )
    rank = comm.get_rank(group)
    if scatter_idx == _HEADS:
        heads = tuple(even_part(spread, peer, world_size) for peer in range(world_size))
        lengths = Lengths.equal(input.shape[sequence_dim], world_size)
        return to_heads(Route(group, rank, lengths, (heads,), sequence_dim, _HEADS), input)[0]
    heads = tuple(even_part(input.shape[_HEADS] * world_size, peer, world_size) for peer in range(world_size))
    lengths = Lengths.equal(spread // world_size, world_size)
    return to_sequence(Route(group, rank, lengths, (heads,), sequence_dim, _HEADS), input)[0]


@not_compiled
def uneven_heads_all2all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: comm.ProcessGroup | None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """Do as `single_all_to_all` for heads and tokens that do not divide: spread as evenly as possible, first ranks fewer.

    Costs one small all-gather more. The parameters are those of `single_all_to_all`; `num_kv_heads` has no effect.

    Raises:
        ArgumentError: there are fewer heads or tokens than ranks.
    """
    world_size, rank = comm.get_world_size(group), comm.get_rank(group)
    sequence_dim = _sequence_dim(input, scatter_idx, gather_idx, batch_dim_idx)
    length, count = input.shape[sequence_dim], input.shape[_HEADS]
    counts = gathered_integers([length, count], group, input.device)
    if scatter_idx == _HEADS:
        heads = tuple(map(HeadPlan(count, count, world_size).queries, range(world_size)))
        lengths = Lengths(tuple(length for length, _ in counts))
        return to_heads(Route(group, rank, lengths, (heads,), sequence_dim, _HEADS), input)[0]
    starts = Lengths(tuple(count for _, count in counts))
    heads = tuple(range(start, start + count) for start, count in zip(starts.starts, starts.tokens, strict=True))
    lengths = Lengths.spread(length, world_size)
    return to_sequence(Route(group, rank, lengths, (heads,), sequence_dim, _HEADS), input)[0]


def register_all_to_all_group(group: comm.ProcessGroup | None) -> str:
    """Prepare for exchanges over `group`, and return its name. The first exchange prepares by itself."""
    parts_exchanger(group)
    return str(getattr(group if group is not None else comm.get_world_group(), "group_name", ""))


def _sequence_dim(tensor: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int) -> int:
    indices = {scatter_idx, gather_idx}
    if tensor.dim() != 4 or batch_dim_idx not in (0, 1) or _HEADS not in indices or not indices & {0, 1}:
        raise ArgumentError(
            f"an all-to-all of shape {tuple(tensor.shape)} with scatter_idx={scatter_idx}, gather_idx={gather_idx}, "
            f"batch_dim_idx={batch_dim_idx}; needed a 4-D tensor with heads in dimension 2, one index 2, the other 0 or "
            "1, and the "
            "batch in 0 or 1."
        )
    return 1 - batch_dim_idx
