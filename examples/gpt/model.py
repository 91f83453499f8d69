"""A small decoder-only Transformer (GPT) in plain PyTorch.

        tokens_BT -> embedding -> [ norm -> attention -> + , norm -> MLP -> + ] x depth -> norm -> logits_BTV
                         |______________________ the same matrix, tied ______________________|

Pre-norm blocks (Radford et al., 2019), rotary positions (Su et al., arXiv:2104.09864), causal attention through PyTorch's
`scaled_dot_product_attention`, output matrix tied to the input embedding (Press and Wolf, arXiv:1608.05859). Nothing here
knows about DeepSpeed; `train.py` hands the module to `deepspeed.initialize`.

Initial weights are normal with deviation 0.02, but those that write to the residual stream are zero: every block starts as
the identity, so the first loss is about ln V whatever the depth.

Shape suffixes: B sequences, T tokens of a sequence, D width, H heads, K = D / H width of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The sizes that define a model; the defaults are what `train.py` trains."""

    vocab_size: int
    context: int = 128
    """Tokens of a training sequence, and the most that `generate` looks back at."""
    depth: int = 2
    width: int = 128
    heads: int = 4

    def __post_init__(self) -> None:
        """Refuse a width that the heads do not divide into even parts (rotation works on pairs)."""
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} and heads={self.heads}: each head needs an equal and even share of the width. "
                f"Try --width {2 * self.heads * max(1, round(self.width / (2 * self.heads)))}."
            )


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (each T x K/2, fp32) by which position t turns pair k: angle t / 10000^(2k/K)."""
    inverse_wavelengths = 10000.0 ** (-torch.arange(0, head_width, 2).float() / head_width)
    angles = torch.outer(torch.arange(context).float(), inverse_wavelengths)
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (k, k + K/2) by its position's angle, so that dot products depend on distances alone."""
    length = x_BHTK.shape[-2]
    cos, sin = cosines[:length].to(x_BHTK.dtype), sines[:length].to(x_BHTK.dtype)
    a, b = x_BHTK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.02)
        nn.init.zeros_(self.out.weight)

    def forward(self, x_BTD: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Mix each position with those before it: B x T x D in, the same out."""
        batch, length, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK, v_BHTK = qkv.unbind(0)
        q_BHTK, k_BHTK = rotate(q_BHTK, cosines, sines), rotate(k_BHTK, cosines, sines)
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(mixed_BHTK.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer MLP, each on a normalised copy and added back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.zeros_(self.down.weight)

    def forward(self, x_BTD: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """B x T x D in, the same out."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cosines, sines)
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class GPT(nn.Module):
    """The model: token ids in; logits, or the loss where targets are given, out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=False)
        cosines, sines = rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits (B x T x V), or with `targets_BT` the mean cross-entropy in nats per token (a scalar, fp32)."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cosines, self.sines)
        logits_BTV = F.linear(self.norm(x_BTD), self.embedding.weight)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    @torch.no_grad()
    def generate(self, tokens_T: Tensor, count: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Continue `tokens_T` by `count` tokens drawn from softmax(logits / temperature); the whole text comes back."""
        for _ in range(count):
            logits_V = self(tokens_T[None, -self.config.context :])[0, -1].float().cpu()
            probabilities_V = torch.softmax(logits_V / temperature, dim=-1)
            token = torch.multinomial(probabilities_V, 1, generator=generator)
            tokens_T = torch.cat((tokens_T, token.to(tokens_T)))
        return tokens_T
