"""The models that are trained, and what they are fed. Each returns its loss.

Legend: B rows of the micro-batch, T positions, D width, V vocabulary, H heads, K width of one head.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCHES = 4  # different micro-batches, used in turn


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalized first and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix_heads = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        joint = self.queries_keys_values(self.before_attention(x_BTD))
        q_BHTK, k_BHTK, v_BHTK = joint.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.mix_heads(seen_BHTK.transpose(1, 2).flatten(2))
        after_BTD: Tensor = x_BTD + self.feed_forward(x_BTD)
        return after_BTD


class Gpt(nn.Module):
    """A decoder of 12 x layers x width^2 + 2 x vocabulary x width parameters and some: 29.5 million as it stands."""

    def __init__(
        self, width: int = 512, layers: int = 8, heads: int = 8, vocabulary: int = 4096, positions: int = 128
    ) -> None:
        super().__init__()
        self.vocabulary, self.positions = vocabulary, positions
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last_norm = nn.LayerNorm(width)
        self.to_vocabulary = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT) + self.places.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.to_vocabulary(self.last_norm(x_BTD))
        return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())

    def batch(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random tokens, (rows, positions)."""
        return torch.randint(self.vocabulary, (rows, self.positions), generator=generator)


class Chain(nn.Module):
    """Many layers so small that what a step costs beyond arithmetic is nearly all of it."""

    def __init__(self, layers: int = 257, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x_BD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BD = torch.tanh(layer(x_BD)) + 0.5 * x_BD
        return x_BD.float().square().mean()

    def batch(self, rows: int, generator: torch.Generator) -> Tensor:
        """Normally distributed features, (rows, width)."""
        return torch.randn(rows, self.width, generator=generator)


class Bare(nn.Module):
    """The parameters of a Gpt without its matrix products: one element-wise pass gives a gradient of full size to each."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(p.detach()) for p in Gpt(**sizes).parameters())

    def forward(self, x_B: Tensor) -> Tensor:
        squares = torch.stack([weight.square().mean().float() for weight in self.weights])
        return squares.sum() * x_B.float().mean()

    def batch(self, rows: int, generator: torch.Generator) -> Tensor:
        """What the loss is multiplied with, (rows,), from 0.5 to 1.5: ranks get different gradients."""
        return torch.rand(rows, generator=generator) + 0.5


Model = Gpt | Chain | Bare


def build_model(arguments: Mapping[str, Any]) -> Model:
    """Return the model that `arguments` speak of, with fixed weights: `chain` layers, a `bare` one, or a Gpt of `model`."""
    torch.manual_seed(0)
    if "chain" in arguments:
        return Chain(arguments["chain"])
    return (Bare if arguments.get("bare") else Gpt)(**arguments.get("model", {}))


def blocks_of(model: Model) -> Iterable[nn.Module]:
    """The parts in which a model does its work one after the other; none in a bare one."""
    return model.blocks if isinstance(model, Gpt) else ()


def bf16_slowdown() -> float:
    """How many times as long as in fp32 this processor takes for a matrix product of the model's shape in bf16.

    Below 1 where bf16 is in hardware. Without, torch may fall back to loops that take a hundred times as long, and then a
    training step in bf16 measures those loops and nothing else.
    """
    torch.set_num_threads(1)
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows_BD, weights_DD = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            torch.mm(rows_BD, weights_DD)
            seconds.append(time.perf_counter() - began)
        best[dtype] = min(seconds[1:])
    return best[torch.bfloat16] / best[torch.float32]


def make_batches(model: Model, rows: int, rank: int) -> list[Tensor]:
    """This rank's micro-batches; equal for all contenders."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [model.batch(rows, generator) for _ in range(BATCHES)]
