"""Tokens to the experts' rows and back: an index on the way there, a weighted gather on the way back, no scatter.

    hidden_TM --index--> rows_RM --exchange--> rows_XM --experts--> rows_XN --exchange--> rows_RN --gather, weigh--> out_TN
                         by expert             of this rank's experts, from all ranks

Letters as in `moe.gating`; `X` = rows that this rank's experts get.

[Note: gradients are the dense model's] An expert sees the tokens of its group's E ranks, each with a loss of its own, so its
gradient is a sum over E losses, while everything else averages losses over ranks. So gradients are multiplied by 1/E where
they enter the experts and by E where they leave them: then the mean over the ranks that hold the same expert, which every
reducer takes, is the gradient of the mean loss (docs/adr/0016, point 3). Both factors ride on products that are made anyhow.

[Note: two hops] Where the axis spans hosts, rows travel first among the ranks of this host, each to the rank that stands at
the place which the receiver has on its own host; then among the ranks of that place over all hosts. So a rank sends one
larger message to each other host, in place of one to each rank there. Same rows, same order, other messages. It costs a copy
of every row, so only small messages go this way: all ranks know how many rows there are, and decide alike.

    rank (h, p) --inside h--> (h, q) --across hosts, at place q--> (h', q)

Lives here: moving rows on one rank (`to_rows`, `from_rows`) and between ranks (`Exchange`). Called by `moe.layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed import comm
from deepspeed.common.shapes_alone import even_counts, has_values
from deepspeed.moe.gating import Pairs, Routing
from deepspeed.topology.mesh import AxisGroup, Hops

__all__ = ["SMALL_MESSAGE_NBYTES", "Exchange", "Ways", "from_rows", "rows_of_experts", "to_rows"]

SMALL_MESSAGE_NBYTES = 1 << 15
"""Bytes from one rank to another, in the mean, up to which two hops are no slower (docs/adr/0016, point 12)."""


def rows_of_experts(routing: Routing | Pairs) -> list[int]:
    """Rows of each expert. Waits for the device; where there are shapes alone, the rows of a router that is balanced."""
    kept_E = routing.kept_E
    if has_values(kept_E):
        rows_E: list[int] = kept_E.tolist()
        return rows_E
    rows_E = even_counts(routing.slot_KT.numel(), kept_E.numel())
    capacity = getattr(routing, "capacity", None)
    return rows_E if capacity is None else [min(rows, capacity) for rows in rows_E]


class Ways:
    """The indices by which rows come from tokens and go back.

    Args:
        routing: where each token goes.
        rows: kept pairs, R.
        gradient_factor: ranks that the experts are spread over; see [Note: gradients are the dense model's].
    """

    def __init__(self, routing: Routing | Pairs, rows: int, gradient_factor: int = 1) -> None:
        choices, tokens = routing.slot_KT.shape
        self.pair_R = routing.pair_P[:rows]
        self.token_R = self.pair_R if choices == 1 else self.pair_R % max(1, tokens)
        self.rows = rows
        self.gradient_factor = gradient_factor
        self.slot_KT = routing.slot_KT
        self.lost_KT: Tensor | None = None
        if rows < choices * tokens:
            self.lost_KT = routing.slot_KT >= rows
            self.slot_KT = routing.slot_KT.clamp(max=max(0, rows - 1))

    def gathered(self, rows_RM: Tensor, weight_KT: Tensor | None) -> Tensor:
        """Per token the sum over its rows, weighted if weights are given; zeros for one without rows."""
        choices, tokens = self.slot_KT.shape
        if not self.rows:
            return rows_RM.new_zeros(tokens, rows_RM.shape[1])
        total_TM: Tensor | None = None
        for choice in range(choices):
            part_TM = rows_RM.index_select(0, self.slot_KT[choice])
            if self.lost_KT is not None:  # before the weight: what is not this token's may be infinite
                part_TM.masked_fill_(self.lost_KT[choice, :, None], 0)
            if total_TM is None:
                total_TM = part_TM if weight_KT is None else part_TM.mul_(weight_KT[choice, :, None])
            elif weight_KT is None:
                total_TM += part_TM
            else:
                total_TM.addcmul_(part_TM, weight_KT[choice, :, None])
        assert total_TM is not None  # a routing has at least one choice
        return total_TM


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TM: Tensor, ways: Ways) -> Tensor:
        ctx.ways = ways
        return hidden_TM.index_select(0, ways.token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RM: Tensor) -> tuple[Tensor, None]:
        gradient_TM = ctx.ways.gathered(gradient_RM, None)
        factor = ctx.ways.gradient_factor
        return gradient_TM if factor == 1 else gradient_TM.mul_(factor), None


class _FromRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RM: Tensor, weight_KT: Tensor, ways: Ways) -> Tensor:
        ctx.ways = ways
        ctx.save_for_backward(rows_RM, weight_KT)
        return ways.gathered(rows_RM, weight_KT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TM: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows_RM, weight_KT = ctx.saved_tensors
        ways: Ways = ctx.ways
        gradient_RM = gradient_TM.index_select(0, ways.token_R)
        of_weight_KT: Tensor | None = None
        if ctx.needs_input_grad[1]:
            of_weight_KT = torch.zeros_like(weight_KT)
            of_weight_KT.view(-1)[ways.pair_R] = torch.linalg.vecdot(rows_RM, gradient_RM)
        weight_R = weight_KT.view(-1)[ways.pair_R]
        if ways.gradient_factor != 1:
            weight_R = weight_R / ways.gradient_factor
        return gradient_RM.mul_(weight_R[:, None]), of_weight_KT, None


def to_rows(hidden_TM: Tensor, ways: Ways) -> Tensor:
    """Return each kept pair's token, expert after expert: (R, M)."""
    rows_RM: Tensor = _ToRows.apply(hidden_TM, ways)  # type: ignore[no-untyped-call]
    return rows_RM


def from_rows(rows_RN: Tensor, weight_KT: Tensor, ways: Ways) -> Tensor:
    """Return per token the weighted sum of what its experts made of it: (T, N); zeros for a token that was dropped."""
    output_TN: Tensor = _FromRows.apply(rows_RN, weight_KT.to(rows_RN.dtype).contiguous(), ways)  # type: ignore[no-untyped-call]
    return output_TN


class _Leg(NamedTuple):
    """One all-to-all of rows, and the order in which they leave."""

    order: tuple[Tensor, Tensor] | None
    leaving: list[int]
    arriving: list[int]
    group: comm.ProcessGroup


class _Way(NamedTuple):
    """Legs one after the other, and the order in which experts get what has arrived."""

    legs: list[_Leg]
    order: tuple[Tensor, Tensor] | None


class _Counts(NamedTuple):
    """Rows that travel, by ranks of the axis.

    Attributes:
        leaving: to each.
        arriving: from each, for each expert here.
        passing: in two hops, those that come by here, place after place and host after host; empty in one.
        total: of all ranks, known to all where they could go in two hops.
    """

    leaving: list[int]
    arriving: list[list[int]]
    passing: list[int]
    total: int


class Exchange:
    """Brings rows to the ranks that hold their experts, and back.

    Every rank of the axis makes one with the same number of experts, and calls both ways; backward passes the same way.
    Where the axis spans hosts small messages go in two hops ([Note: two hops]); rows arrive in the same order.

    Args:
        axis: ranks that the experts are spread over.
        routing: of this rank's tokens, over all experts of the layer.
        num_local_experts: experts of each rank.
    """

    def __init__(self, axis: AxisGroup, routing: Routing | Pairs, num_local_experts: int) -> None:
        kept_E = routing.kept_E
        self._axis, self._hops, self._device = axis, axis.hops(), kept_E.device
        if not has_values(kept_E):
            told = _counts_if_balanced(axis, rows_of_experts(routing), num_local_experts)
        elif self._hops is None:
            told = _counts(axis, kept_E, num_local_experts)
        else:
            told = _counts_by_hosts(self._hops, kept_E)
        self._counts = told
        self._ways: dict[bool, _Way] = {}
        self.leaving_rows = sum(told.leaving)
        """Rows of this rank's tokens."""
        self.rows_per_expert = [sum(counts) for counts in zip(*told.arriving, strict=True)]
        """Rows that each of this rank's experts gets."""

    def there(self, rows_RM: Tensor) -> Tensor:
        """Return what this rank's experts get from all ranks, expert after expert, then rank after rank: (X, M)."""
        legs, last = self._way(rows_RM)
        for order, leaving, arriving, group in legs:
            leaving_RM = rows_RM if order is None else _permuted(rows_RM, *order)
            rows_RM = _AllToAll.apply(leaving_RM, leaving, arriving, group)  # type: ignore[no-untyped-call]
        return rows_RM if last is None else _permuted(rows_RM, *last)

    def back(self, rows_XN: Tensor) -> Tensor:
        """Return what the experts of all ranks made of this rank's rows, in the order of `there`'s argument: (R, N)."""
        legs, last = self._way(rows_XN)
        rows = rows_XN if last is None else _permuted(rows_XN, *reversed(last))
        for order, leaving, arriving, group in reversed(legs):
            rows = _AllToAll.apply(rows, arriving, leaving, group)  # type: ignore[no-untyped-call]
            rows = rows if order is None else _permuted(rows, *reversed(order))
        return rows

    def _way(self, rows: Tensor) -> _Way:
        """The same on all ranks: rows are as wide there, and all know the total."""
        mean_nbytes = self._counts.total * rows.shape[1] * rows.element_size() / self._axis.size**2
        hops = self._hops if mean_nbytes <= SMALL_MESSAGE_NBYTES else None
        key = hops is not None
        if key not in self._ways:
            way = _straight(self._axis, self._counts, self._device)
            self._ways[key] = way if hops is None else _by_hosts(hops, self._counts, self._device)
        return self._ways[key]


def _counts(axis: AxisGroup, kept_E: Tensor, num_local_experts: int) -> _Counts:
    arriving_E = torch.empty_like(kept_E)
    comm.all_to_all_single(arriving_E, kept_E, group=axis.group)
    leaving, arriving = torch.stack([kept_E, arriving_E]).view(2, axis.size, num_local_experts).tolist()
    return _Counts(_sums(leaving), arriving, [], 0)


def _counts_if_balanced(axis: AxisGroup, rows_E: Sequence[int], num_local_experts: int) -> _Counts:
    """Of ranks that all have the same rows for each expert; nothing is sent."""
    by_rank = [list(rows_E[at : at + num_local_experts]) for at in range(0, len(rows_E), num_local_experts)]
    return _Counts(_sums(by_rank), [by_rank[axis.rank]] * axis.size, [], 0)


def _counts_by_hosts(hops: Hops, kept_E: Tensor) -> _Counts:
    """In two hops, each rank's total beside its counts. Letters: `H` hosts, `L` places on each, `C` counts of one rank."""
    hosts, places = hops.across.size, hops.inside.size
    positions = torch.tensor(hops.positions, device=kept_E.device)
    totals_H1 = kept_E.sum().expand(hosts * places, 1)
    leaving_HC = torch.cat([kept_E.view(hosts * places, -1)[positions], totals_H1], dim=1)
    leaving_LHC = leaving_HC.view(hosts, places, -1).transpose(0, 1).contiguous()
    passing_LHC = torch.empty_like(leaving_LHC)
    comm.all_to_all_single(passing_LHC, leaving_LHC, group=hops.inside.group)
    passing_HLC = passing_LHC.transpose(0, 1).contiguous()
    arriving_HLC = torch.empty_like(passing_HLC)
    comm.all_to_all_single(arriving_HLC, passing_HLC, group=hops.across.group)
    told = torch.stack([leaving_HC.flatten(), passing_LHC.flatten(), arriving_HLC.flatten()])
    leaving, passing, arriving = told.view(3, hosts * places, -1).tolist()
    number_of = {position: number for number, position in enumerate(hops.positions)}
    by_position = [number_of[position] for position in range(hosts * places)]
    return _Counts(
        [sum(leaving[number][:-1]) for number in by_position],
        [arriving[number][:-1] for number in by_position],
        [sum(counts[:-1]) for counts in passing],
        sum(counts[-1] for counts in arriving),
    )


def _straight(axis: AxisGroup, counts: _Counts, device: torch.device) -> _Way:
    leg = _Leg(None, counts.leaving, _sums(counts.arriving), axis.group)
    return _Way([leg], _by_expert(counts.arriving, range(axis.size), device))


def _by_hosts(hops: Hops, counts: _Counts, device: torch.device) -> _Way:
    """[Note: two hops]; lists here are host after host, place after place."""
    hosts, places = hops.across.size, hops.inside.size
    host_of, place_of = [0] * (hosts * places), [0] * (hosts * places)
    for number, position in enumerate(hops.positions):
        host_of[position], place_of[position] = divmod(number, places)
    by_place = [place * hosts + host for host, place in zip(host_of, place_of, strict=True)]
    arriving = _sums([counts.arriving[position] for position in hops.positions])
    inside = _Leg(
        _order(by_place, counts.leaving, device),
        [sum(n for n, at in zip(counts.leaving, place_of, strict=True) if at == place) for place in range(places)],
        [sum(counts.passing[place * hosts : (place + 1) * hosts]) for place in range(places)],
        hops.inside.group,
    )
    across = _Leg(
        _order([host * places + place for place in range(places) for host in range(hosts)], counts.passing, device),
        [sum(counts.passing[host::hosts]) for host in range(hosts)],
        [sum(arriving[host * places : (host + 1) * places]) for host in range(hosts)],
        hops.across.group,
    )
    return _Way([inside, across], _by_expert(counts.arriving, hops.positions, device))


def _by_expert(
    arriving: Sequence[Sequence[int]], senders: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Rows that came sender after sender in the order of experts, and there of ranks."""
    stretches = [
        (place * len(senders) + sender, count) for sender in senders for place, count in enumerate(arriving[sender])
    ]
    return _order([key for key, _ in stretches], [count for _, count in stretches], device)


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(each) for each in counts]


def _order(keys: Sequence[int], counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Index by which stretches of rows stand in the order of their keys, and its inverse; None where they do already."""
    if all(one <= other for one, other in pairwise(keys)):
        return None
    keys_X = torch.tensor(keys).repeat_interleave(torch.tensor(counts), output_size=sum(counts))
    index_X = keys_X.argsort(stable=True)
    inverse_X = torch.empty_like(index_X)
    inverse_X[index_X] = torch.arange(index_X.numel())
    return index_X.to(device, non_blocking=True), inverse_X.to(device, non_blocking=True)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_XM: Tensor, index_X: Tensor, inverse_X: Tensor) -> Tensor:
        ctx.inverse_X = inverse_X
        return rows_XM.index_select(0, index_X)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_XM: Tensor) -> tuple[Tensor, None, None]:
        return gradient_XM.index_select(0, ctx.inverse_X), None, None


def _permuted(rows_XM: Tensor, index_X: Tensor, inverse_X: Tensor) -> Tensor:
    permuted_XM: Tensor = _Permute.apply(rows_XM, index_X, inverse_X)  # type: ignore[no-untyped-call]
    return permuted_XM


class _AllToAll(torch.autograd.Function):
    """Rows to ranks by counts; backward is the same with the counts changed over."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int], group: comm.ProcessGroup) -> Tensor:
        ctx.leaving, ctx.arriving, ctx.group = leaving, arriving, group
        return _exchanged(rows, leaving, arriving, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.arriving, ctx.leaving, ctx.group), None, None, None


def _exchanged(rows: Tensor, leaving: list[int], arriving: list[int], group: comm.ProcessGroup) -> Tensor:
    """Bytes travel: gloo has no all-to-all of bf16."""
    arrived = rows.new_empty(sum(arriving), rows.shape[1])
    sent = rows.contiguous().view(torch.uint8)
    comm.all_to_all_single(arrived.view(torch.uint8), sent, arriving, leaving, group=group)
    return arrived
