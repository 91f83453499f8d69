"""Cross entropy of logits that are there, whose fp32 copies live for a block of rows at a time.

    logits (N, V)   rows 0..b      fp32 --> log-sum-exp, loss
                    rows b..2b     fp32 --> ...
    backward        rows 0..b      fp32 --> softmax - one-hot --> gradient, in the logits' dtype

`torch.nn.functional.cross_entropy` keeps log-probabilities of the size of the logits, in fp32 where the logits were
upcast first, and makes a gradient of that size. Here the logits themselves are what is kept.

Lives here: the function and a loss for Hugging Face's decoders. Does not live here: a loss that never holds all logits
(`tiled.TiledFusedLogitsLoss`). `deepspeed.runtime.chunked_cross_entropy` is the door.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspeed.errors import ArgumentError

__all__ = ["ChunkedCausalLMLoss", "chunked_cross_entropy", "install_chunked_causal_lm_loss"]

_BLOCK_NUMEL = 1 << 24
"""Elements of a block where nobody chose: 64 MiB in fp32."""


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    block_rows: int | None = None,
    backend: Literal["auto", "torch"] = "auto",
) -> Tensor:
    """`torch.nn.functional.cross_entropy(logits.float(), target)`, block by block.

    Args:
        logits: (..., classes), of any floating-point dtype; 16-bit values are upcast block by block, fp64 stays.
        target: (...), classes.
        ignore_index: a target that does not count.
        reduction: "mean" over targets that count (NaN where none does, as torch has it), "sum", or "none".
        block_rows: rows per block; by default 64 MiB of them.
        backend: "auto" or "torch", which are the same.

    Returns:
        The loss, in fp32 (fp64 for fp64 logits); for "none" of the shape of `target`, zero where it does not count.

    Raises:
        ArgumentError: shapes that do not go together, or an unknown reduction, backend or number of rows.
    """
    if logits.shape[:-1] != target.shape or logits.dim() < 1:
        raise ArgumentError(
            f"chunked_cross_entropy: logits have shape {tuple(logits.shape)} and targets {tuple(target.shape)}; needed "
            "(..., classes) and (...). Put classes last."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f'chunked_cross_entropy(reduction={reduction!r}): needed "mean", "sum" or "none".')
    if backend not in ("auto", "torch"):
        raise ArgumentError(f'chunked_cross_entropy(backend={backend!r}): this version has "auto" and "torch". Use "auto".')
    if block_rows is not None and block_rows < 1:
        raise ArgumentError(f"chunked_cross_entropy(block_rows={block_rows}): needed at least 1. Leave it out for 64 MiB.")
    classes = logits.size(-1)
    rows = block_rows or max(1, _BLOCK_NUMEL // max(1, classes))
    losses_N: Tensor = _RowLosses.apply(logits.reshape(-1, classes), target.reshape(-1), ignore_index, rows)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses_N.view(target.shape)
    total = losses_N.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _blocks(rows: int, per_block: int) -> Iterator[slice]:
    return (slice(start, min(start + per_block, rows)) for start in range(0, rows, per_block))


def _upcast(block_BV: Tensor) -> Tensor:
    return block_BV if block_BV.dtype is torch.float64 else block_BV.float()


class _RowLosses(torch.autograd.Function):
    """One loss per row."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, ignore_index: int, rows: int) -> Tensor:
        wide = torch.float64 if logits_NV.dtype is torch.float64 else torch.float32
        lse_N = logits_NV.new_empty(len(logits_NV), dtype=wide)
        counts_N = target_N != ignore_index
        class_N = target_N.masked_fill(~counts_N, 0)
        for block in _blocks(len(logits_NV), rows):
            torch.logsumexp(_upcast(logits_NV[block]), -1, out=lse_N[block])
        chosen_N = logits_NV.gather(-1, class_N[:, None]).squeeze(-1).to(wide)
        ctx.save_for_backward(logits_NV, class_N, counts_N, lse_N)
        ctx.rows = rows
        return (lse_N - chosen_N).masked_fill(~counts_N, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, class_N, counts_N, lse_N = ctx.saved_tensors
        grad_N = grad_N.masked_fill(~counts_N, 0.0)
        grad_NV = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
        for block in _blocks(len(logits_NV), ctx.rows):
            share_BV = (_upcast(logits_NV[block]) - lse_N[block, None]).exp_()
            share_BV.scatter_add_(-1, class_N[block, None], torch.full_like(lse_N[block, None], -1.0))
            grad_NV[block] = share_BV.mul_(grad_N[block, None])
        return grad_NV, None, None, None


class ChunkedCausalLMLoss:
    """The loss of Hugging Face's causal language models, by `chunked_cross_entropy`.

    Args:
        block_rows: see `chunked_cross_entropy`.
        backend: see `chunked_cross_entropy`.
    """

    def __init__(self, block_rows: int | None = None, backend: Literal["auto", "torch"] = "auto") -> None:
        self.block_rows = block_rows
        self.backend = backend

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of predicting each next token.

        Args:
            logits: (batch, tokens, vocabulary).
            labels: (batch, tokens), not shifted; unused where `shift_labels` is given.
            vocab_size: taken for compatibility.
            num_items_in_batch: what the sum is divided by; None: the labels that count.
            ignore_index: labels that do not count.
            shift_labels: (batch, tokens), shifted already.
            kwargs: taken for compatibility.

        Raises:
            ArgumentError: neither labels nor shifted ones.
        """
        if shift_labels is None:
            if labels is None:
                raise ArgumentError("ChunkedCausalLMLoss got neither labels nor shift_labels. Give one of them.")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction: Literal["mean", "sum"] = "mean" if num_items_in_batch is None else "sum"
        target = shift_labels.to(logits.device)
        loss = chunked_cross_entropy(logits, target, ignore_index, reduction, self.block_rows, self.backend)
        if num_items_in_batch is None:
            return loss
        return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


def install_chunked_causal_lm_loss(
    model: nn.Module, block_rows: int | None = None, backend: Literal["auto", "torch"] = "auto"
) -> ChunkedCausalLMLoss:
    """Let a Hugging Face model compute its loss by `ChunkedCausalLMLoss`; returns the loss.

    Args:
        model: one whose class takes its loss from `loss_function`.
        block_rows: see `chunked_cross_entropy`.
        backend: see `chunked_cross_entropy`.

    Raises:
        ArgumentError: the model has no such loss.
    """
    if not hasattr(model, "loss_function"):
        raise ArgumentError(
            f"install_chunked_causal_lm_loss: {type(model).__name__} has no loss_function. Give a causal language model of "
            "Hugging Face's library, or call chunked_cross_entropy in the model."
        )
    owner: Any = model
    owner.loss_function = loss = ChunkedCausalLMLoss(block_rows, backend)
    return loss
