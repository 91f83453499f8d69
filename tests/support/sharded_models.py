"""Models for tests of sharded parameters: each has something that a plain chain of layers has not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    """A residual block whose LayerNorm saves its weight as it is and whose linear layers save views of theirs."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return result


BLOCK_NUMEL = sum(p.numel() for p in Block().parameters())


class Gpt(nn.Module):
    """Tied embedding, a parameter of the model itself, a list of blocks."""

    def __init__(self, layers: int = 3, *, recompute: str = "no") -> None:
        super().__init__()
        self.wte = nn.Embedding(11, WIDTH)
        self.pos = nn.Parameter(torch.randn(5, WIDTH))
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.wte.weight
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.wte(tokens) + self.pos
        for block in self.h:
            hidden = self.run(block, hidden)
        loss: Tensor = F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())
        return loss

    def run(self, block: nn.Module, hidden: Tensor) -> Any:
        """Run `block`, recomputing it in backward when that was asked for."""
        if self.recompute == "no":
            return block(hidden)
        return checkpoint(block, hidden, use_reentrant=self.recompute == "reentrant")


def tokens(seed: int = 0, rows: int = 3) -> Tensor:
    """A batch for `Gpt`."""
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(seed))


class Uses(nn.Module):
    """Two layers and a function that uses them in its own way: `forward(x)` is `function(self, x)`."""

    def __init__(self, function: Callable[[Any, Tensor], Any], *, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.function = function

    def forward(self, inputs: Tensor) -> Any:
        return self.function(self, inputs)


@dataclass
class Output:
    """A data class that torch's trees do not know."""

    value: Tensor
    name: str = "output"


def inputs(seed: int = 0, rows: int = 3, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch for `Uses`."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
