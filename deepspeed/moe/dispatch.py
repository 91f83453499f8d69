"""Tokens to the experts' rows and back: an index on the way there, a weighted gather on the way back, no scatter.

    hidden_TM --index--> rows_RM --exchange--> rows_XM --experts--> rows_XN --exchange--> rows_RN --gather, weigh--> out_TN
                         by expert             of this rank's experts, from all ranks

Letters as in `moe.gating`; `X` = rows that this rank's experts get.

[Note: gradients are the dense model's] An expert sees the tokens of its group's E ranks, each with a loss of its own, so its
gradient is a sum over E losses, while everything else averages losses over ranks. So gradients are multiplied by 1/E where
they enter the experts and by E where they leave them: then the mean over the ranks that hold the same expert, which every
reducer takes, is the gradient of the mean loss (docs/adr/0016, point 3). Both factors ride on products that are made anyhow.

Lives here: moving rows on one rank (`to_rows`, `from_rows`) and between ranks (`Exchange`). Called by `moe.layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed import comm
from deepspeed.moe.gating import Pairs, Routing
from deepspeed.topology.mesh import AxisGroup

__all__ = ["Exchange", "Ways", "from_rows", "to_rows"]


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


class Exchange:
    """Brings rows to the ranks that hold their experts, and back.

    Every rank of the axis makes one with the same number of experts, and calls both ways; backward passes the same way.

    Args:
        axis: ranks that the experts are spread over.
        kept_E: this rank's rows for each expert of the layer, on its device.
        num_local_experts: experts of each rank.
    """

    def __init__(self, axis: AxisGroup, kept_E: Tensor, num_local_experts: int) -> None:
        self._group = axis.group
        arriving_E = torch.empty_like(kept_E)
        comm.all_to_all_single(arriving_E, kept_E, group=self._group)
        leaving, arriving = torch.stack([kept_E, arriving_E]).view(2, axis.size, num_local_experts).tolist()
        self._leaving = [sum(counts) for counts in leaving]
        self._arriving = [sum(counts) for counts in arriving]
        self.leaving_rows = sum(self._leaving)
        """Rows of this rank's tokens."""
        self.rows_per_expert = [sum(counts) for counts in zip(*arriving, strict=True)]
        """Rows that each of this rank's experts gets."""
        self._order = _by_expert(arriving, kept_E.device) if num_local_experts > 1 else None

    def there(self, rows_RM: Tensor) -> Tensor:
        """Return what this rank's experts get from all ranks, expert after expert: (X, M)."""
        arrived_XM: Tensor = _AllToAll.apply(rows_RM, self._leaving, self._arriving, self._group)  # type: ignore[no-untyped-call]
        return arrived_XM if self._order is None else _permuted(arrived_XM, *self._order)

    def back(self, rows_XN: Tensor) -> Tensor:
        """Return what the experts of all ranks made of this rank's rows, in the order of `there`'s argument: (R, N)."""
        leaving_XN = rows_XN if self._order is None else _permuted(rows_XN, *reversed(self._order))
        returned_RN: Tensor = _AllToAll.apply(leaving_XN, self._arriving, self._leaving, self._group)  # type: ignore[no-untyped-call]
        return returned_RN


def _by_expert(arriving: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Index by which rows that came rank after rank stand expert after expert, and its inverse."""
    expert_X = torch.tensor([place for counts in arriving for place in range(len(counts))])
    expert_X = expert_X.repeat_interleave(torch.tensor([count for counts in arriving for count in counts]))
    index_X = expert_X.argsort(stable=True)
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
