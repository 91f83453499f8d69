"""A layer of chunks and what it must come to: plain attention over the whole sequence, with the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.sequence.fpdt_layer import FPDT_Attention

HEADS, HEAD_SIZE = 4, 8
WIDTH = HEADS * HEAD_SIZE


def parameters(key_heads: int, seed: int = 0) -> list[nn.Parameter]:
    """Weight and bias of the projection, weight and bias of the output's; fp64."""
    generator = torch.Generator().manual_seed(seed)
    rows = (HEADS + 2 * key_heads) * HEAD_SIZE
    shapes = [(rows, WIDTH), (rows,), (WIDTH, WIDTH), (WIDTH,)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3) for shape in shapes]


def hidden(tokens: int, batch: int = 2) -> Tensor:
    """(tokens, batch, width) of the whole sequence."""
    return torch.randn(tokens, batch, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def angles(tokens: int, size: int = HEAD_SIZE // 2) -> Tensor:
    """Rotary angles of part of the head size: (tokens, 1, 1, size)."""
    half = torch.outer(torch.arange(tokens, dtype=torch.float64), torch.tensor([1.0, 0.3], dtype=torch.float64)[: size // 2])
    return torch.cat([half, half], -1)[:, None, None]


def layer(weights: list[nn.Parameter], key_heads: int, **settings: Any) -> FPDT_Attention:
    """The layer under test."""
    config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=key_heads, hidden_size=WIDTH)
    return FPDT_Attention(config, *weights, **settings)


def plain(weights: list[nn.Parameter], key_heads: int, x: Tensor, rotary: Tensor | None) -> Tensor:
    """The whole attention layer in plain torch."""
    mixed = F.linear(x, weights[0], weights[1])
    sizes = [HEADS * HEAD_SIZE, *[key_heads * HEAD_SIZE] * 2]
    q, k, v = (part.unflatten(-1, (-1, HEAD_SIZE)) for part in mixed.split(sizes, -1))
    if rotary is not None:
        q, k = (_rotated(part, rotary) for part in (q, k))
    q, k, v = (part.repeat_interleave(HEADS // part.size(2), 2).permute(1, 2, 0, 3) for part in (q, k, v))
    context = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
    return F.linear(context, weights[2], weights[3])


def _rotated(part: Tensor, rotary: Tensor) -> Tensor:
    turned, rest = part[..., : rotary.size(-1)], part[..., rotary.size(-1) :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * rotary.cos() + torch.cat([-second, first], -1) * rotary.sin(), rest], -1)
