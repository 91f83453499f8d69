"""Cross-entropy of logits of which each rank has a part of the vocabulary; no rank ever holds all of them.

    logits_NV: own columns --> max --all-reduce--> exp, sum and own target's logit --all-reduce--> loss_N
                                                                       backward: softmax - one-hot, no communication

Two small all-reduces, of N and of 2 N numbers. Lives here: the function. Does not live here: layers whose outputs are such
parts (`tensor_parallel.layers`), the names by which clients call it (`sequence.cross_entropy`). All ranks of the group must
call it with the same targets. Legend: N tokens, V this rank's part of the vocabulary.

Source: Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm import collectives
from deepspeed.comm.sums import all_reduce_now
from deepspeed.errors import ArgumentError, UsageError

__all__ = ["vocab_parallel_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the cross-entropy, alike on all ranks; 16-bit logits are computed with in float32. Collective over `group`.

    Args:
        vocab_parallel_logits: (..., V): ranks hold the vocabulary in their order, as evenly as it goes.
        target: (...): tokens of the whole vocabulary, or `ignore_index`.
        group: the ranks that share it; None: all.
        vocab_size: of all ranks together; None: every rank has as many as this one.
        ignore_index: targets that do not count.
        reduction: mean over the targets that count (not a number where none does), their sum, or each by itself.

    Raises:
        ArgumentError: shapes, widths or the reduction do not fit.
    """
    width, ranks, rank = vocab_parallel_logits.shape[-1], dist.get_world_size(group), dist.get_rank(group)
    widths = _shares(width * ranks if vocab_size is None else vocab_size, ranks)
    if widths[rank] != width or vocab_parallel_logits.shape[:-1] != target.shape:
        raise ArgumentError(
            f"logits of shape {tuple(vocab_parallel_logits.shape)} and targets of shape {tuple(target.shape)} on group rank "
            f"{rank}, with a vocabulary shared out as {widths}. Give this rank's columns of it, for one target each."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"reduction={reduction!r}: needed 'mean', 'sum' or 'none'.")
    losses_N: Tensor = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        vocab_parallel_logits.reshape(target.numel(), width), target.reshape(-1), group, sum(widths[:rank]), ignore_index
    )
    if reduction == "none":
        return losses_N.view(target.shape)
    total = losses_N.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _shares(vocab_size: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank, as evenly as they go: the first ranks have one more (`sharding.cut.even_widths`)."""
    return tuple(vocab_size // ranks + (rank < vocab_size % ranks) for rank in range(ranks))


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, group: Any, start: int, ignore_index: int) -> Tensor:
        dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        largest_N = torch.full(target_N.shape, -torch.inf, dtype=dtype, device=logits_NV.device)
        if logits_NV.shape[1]:
            largest_N.copy_(logits_NV.amax(1))
        all_reduce_now(largest_N, group, collectives.ReduceOp.MAX)
        shifted_NV = logits_NV.to(dtype) - largest_N.unsqueeze(1)
        is_own_N = (target_N >= start) & (target_N < start + logits_NV.shape[1])
        rows_K = is_own_N.nonzero().squeeze(1)
        columns_K = target_N[rows_K] - start
        sums_2N = torch.zeros(2, *target_N.shape, dtype=dtype, device=logits_NV.device)
        sums_2N[1, rows_K] = shifted_NV[rows_K, columns_K]
        softmax_NV = shifted_NV.exp_()
        sums_2N[0] = softmax_NV.sum(1)
        all_reduce_now(sums_2N, group)
        softmax_NV /= sums_2N[0].unsqueeze(1)
        is_ignored_N = target_N == ignore_index
        ctx.save_for_backward(softmax_NV, rows_K, columns_K, is_ignored_N)
        ctx.dtype = logits_NV.dtype
        return (sums_2N[0].log() - sums_2N[1]).masked_fill_(is_ignored_N, 0)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        if torch.is_grad_enabled():  # `once_differentiable` lets a loss pass, whose own gradient depends on nothing
            raise UsageError(
                "vocab_parallel_cross_entropy has no second derivative, which create_graph=True asks for. Leave "
                "tensor_parallel.vocab_parallel_lm_head out: the loss is then computed from whole logits."
            )
        softmax_NV, rows_K, columns_K, is_ignored_N = ctx.saved_tensors
        gradient_N = gradient_N.masked_fill(is_ignored_N, 0)
        gradient_NV = softmax_NV * gradient_N.unsqueeze(1)
        gradient_NV[rows_K, columns_K] -= gradient_N[rows_K]
        return gradient_NV.to(ctx.dtype), None, None, None, None
