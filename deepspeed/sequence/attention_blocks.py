"""Attention of a block of queries over a block of keys, with what is needed to put blocks together.

    forward    q_i, k_j, v_j            -> out_ij, lse_ij                 softmax over block j alone
    merge      lse_i = log sum_j exp lse_ij,  out_i = sum_j exp(lse_ij - lse_i) out_ij
    backward   grad of out_i, out_i, lse_i, q_i, k_j, v_j -> block j's part of the gradients

With the log-sum-exp of the whole row, `exp(scores - lse)` are the whole row's probabilities, so a block's gradients need
nothing of the other blocks. (Online softmax, arXiv:2112.05682; FlashAttention, arXiv:2205.14135, section 3.1 and
algorithm 4.)

Shapes: q (B, H, Tq, D), k and v (B, K, Tk, D) with H a multiple of K: each key and value head serves H / K query heads
in a row. out as q, lse (B, H, Tq) in fp32 (fp64 for fp64).

Lives here: the kernels, by device, and `merge`. Does not live here: which blocks there are (`chunked_attention`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["BlockKernel", "FlashBlocks", "HostFlashBlocks", "MathBlocks", "block_kernel", "merge", "wide_dtype"]

_FLASH_HEAD_SIZE = 256  # the largest that the flash kernel of accelerators takes; it also wants multiples of 8


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are made in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> Tensor:
    """Add a block to `out` (wide, in place); returns the new log-sum-exp."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp().unsqueeze(-1)).add_(block_out * (block_lse - total).exp().unsqueeze(-1))
    return total


class BlockKernel(Protocol):
    """Computes blocks. A causal block has as many queries as keys, in the same places."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the block alone."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of the gradients of q, k, v; `out` and `lse` are those of the whole rows."""


def block_kernel(q: Tensor) -> BlockKernel:
    """The best kernel for such queries. The CPU's flash kernel ends the process where there are none."""
    if q.numel() == 0:
        return MathBlocks()
    if q.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return HostFlashBlocks()
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and is_half and q.size(-1) <= _FLASH_HEAD_SIZE and q.size(-1) % 8 == 0:
        return FlashBlocks()
    return MathBlocks()


class MathBlocks:
    """Plain operators: any device and dtype. Holds the block's scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        scores = self._scores(q, k, is_causal, scale)
        lse = torch.logsumexp(scores, -1)
        out = (scores - lse.unsqueeze(-1)).exp_() @ _wide(v).unsqueeze(2)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`."""
        share = (self._scores(q, k, is_causal, scale) - _grouped(lse, k).unsqueeze(-1)).exp_()
        grad_wide, keys = _grouped(_wide(grad), k), _wide(k).unsqueeze(2)
        grad_v = (share.transpose(-1, -2) @ grad_wide).sum(2)
        through = grad_wide @ _wide(v).unsqueeze(2).transpose(-1, -2)
        delta = (grad_wide * _grouped(_wide(out), k)).sum(-1, keepdim=True)
        of_scores = share.mul_(through.sub_(delta)).mul_(scale)
        grad_k = (of_scores.transpose(-1, -2) @ _grouped(_wide(q), k)).sum(2)
        return (of_scores @ keys).flatten(1, 2), grad_k, grad_v

    def _scores(self, q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
        """(B, K, H / K, Tq, Tk)."""
        scores = _grouped(_wide(q), k) @ _wide(k).unsqueeze(2).transpose(-1, -2) * scale
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores.masked_fill_(later, -torch.inf)
        return scores


class HostFlashBlocks:
    """The CPU's flash kernel, which is behind `scaled_dot_product_attention` there. Holds no scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        k, v = _repeated(k, q), _repeated(v, q)
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`."""
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        keys, values = _repeated(k, q), _repeated(v, q)
        grad_q, grad_k, grad_v = run(grad, q, keys, values, out, lse, 0.0, is_causal, scale=scale)
        return grad_q, _added(grad_k, k), _added(grad_v, v)


class FlashBlocks:
    """The flash kernel of accelerators, for 16-bit values. Holds no scores.

    Its backward is given what forward told about the same lengths; without dropout that is lengths and unused seeds.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[int, int, bool], tuple[Any, ...]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention
        found = run(q, _repeated(k, q), _repeated(v, q), 0.0, is_causal, scale=scale)
        self._told[q.size(2), k.size(2), is_causal] = found[2:8]
        return found[0], found[1]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`."""
        keys, values = _repeated(k, q), _repeated(v, q)
        key = q.size(2), k.size(2), is_causal
        if key not in self._told:
            self.forward(q, k, v, is_causal=is_causal, scale=scale)
        cum_q, cum_k, max_q, max_k, seed, offset = self._told[key]
        run: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        grad_q, grad_k, grad_v = run(
            grad, q, keys, values, out, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, offset, scale=scale
        )
        return grad_q, _added(grad_k, k), _added(grad_v, v)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def _grouped(tensor: Tensor, k: Tensor) -> Tensor:
    """(B, H, ...) as (B, K, H / K, ...)."""
    return torch.unflatten(tensor, 1, (k.size(1), tensor.size(1) // k.size(1)))


def _repeated(heads: Tensor, q: Tensor) -> Tensor:
    """Key or value heads, one for each query head."""
    count = q.size(1) // heads.size(1)
    return heads if count == 1 else heads.repeat_interleave(count, 1)


def _added(grad: Tensor, heads: Tensor) -> Tensor:
    """Gradients of repeated heads, added up."""
    return grad if grad.size(1) == heads.size(1) else _wide(_grouped(grad, heads)).sum(2)
