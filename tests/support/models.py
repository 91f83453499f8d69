"""Tiny models that each hold one difficulty, with batches to feed them.

Every model returns its loss, a mean over the rows of the batch, from `model(*batch)`, and makes batches with
`model.batch(rows, seed)`. Equal calls give equal models and batches, whatever happened before, so ranks and the
one-process reference build the same thing without talking to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Batches = list[list[list[Batch]]]
Model = TypeVar("Model", bound="TinyModel")


class TinyModel(nn.Module):
    """A model that returns its loss and knows what to be fed. `VALUES` features in and out, or tokens below `VOCABULARY`."""

    VALUES = 7  # prime: nothing divides it evenly among ranks
    VOCABULARY = 11

    def batch(self, rows: int, seed: int) -> Batch:
        """Return inputs and targets for regression, both (rows, VALUES), in the dtype of the model's parameters."""
        return self._regression(rows, torch.Generator().manual_seed(seed))

    def _regression(self, rows: int, generator: torch.Generator) -> Batch:
        shape = (2, rows, self.VALUES)
        inputs, targets = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return inputs, targets

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())


class Mlp(TinyModel):
    """Two linear layers, tanh between: no corner in the loss, so rounding stays small."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__()
        self.first = nn.Linear(self.VALUES, hidden)
        self.second = nn.Linear(hidden, self.VALUES)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(inputs))), targets)


class TiedLm(TinyModel):
    """A language model whose output layer is its embedding: one parameter, two gradients per backward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def batch(self, rows: int, seed: int) -> Batch:
        return _tokens(self.VOCABULARY, rows, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class TiedGpt(TinyModel):
    """A small GPT: tied embedding, a parameter of the root itself (positions), layer norms, blocks in a ModuleList."""

    POSITIONS = 5

    def __init__(self, width: int = 6, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(self.POSITIONS - 1, width) * 0.1)
        self.blocks = nn.ModuleList(GptBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def batch(self, rows: int, seed: int) -> Batch:
        return _tokens(self.VOCABULARY, rows, seed, self.POSITIONS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens[:, 1:].flatten())


class GptBlock(nn.Module):
    """Causal attention with one head, then two linear layers, each after a layer norm and around a residual.

    Keys have no bias: softmax ignores it, so its gradient would be pure rounding, which Adam would blow up to full steps.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_1(hidden)).chunk(3, dim=-1)
        positions = hidden.shape[1]
        future = torch.ones(positions, positions, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(1, 2) / math.sqrt(hidden.shape[2])).masked_fill(future, -math.inf)
        hidden = hidden + self.project(scores.softmax(-1) @ value)
        return hidden + self.down(torch.tanh(self.up(self.norm_2(hidden))))


class SparseEmbedding(TinyModel):
    """An embedding with sparse gradients, as `sparse_gradients` is for, before a dense layer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width, sparse=True)
        self.head = nn.Linear(width, self.VOCABULARY)

    def batch(self, rows: int, seed: int) -> Batch:
        return _tokens(self.VOCABULARY, rows, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())


class PartlyFrozen(Mlp):
    """An Mlp whose first layer does not train."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__(hidden)
        self.first.requires_grad_(False)


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained adapter of two narrow factors beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.randn(outputs, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Lora(TinyModel):
    """Two adapted layers: each frozen weight has `VALUES * hidden` elements, each trained factor at most `rank * hidden`."""

    def __init__(self, hidden: int = 32, rank: int = 2) -> None:
        super().__init__()
        self.first = LoraLinear(self.VALUES, hidden, rank)
        self.second = LoraLinear(hidden, self.VALUES, rank)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(inputs))), targets)


class Branching(Mlp):
    """An Mlp with a branch that the batch switches: for a micro-batch some ranks, all or none may use it."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__(hidden)
        self.branch = nn.Linear(self.VALUES, hidden)

    def batch(self, rows: int, seed: int) -> Batch:
        """Inputs, targets and a boolean: with the branch or without."""
        generator = torch.Generator().manual_seed(seed)
        return *self._regression(rows, generator), torch.rand((), generator=generator) < 0.4

    def forward(self, inputs: Tensor, targets: Tensor, with_branch: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if with_branch:
            hidden = hidden + torch.tanh(self.branch(inputs))
        return F.mse_loss(self.second(hidden), targets)


class WithEmptyParameter(Mlp):
    """An Mlp with a parameter of no elements, used in the loss, between the others."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__(hidden)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(inputs, targets) + self.empty.sum()


class WithUnusedParameter(Mlp):
    """An Mlp with a layer that no forward uses."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__(hidden)
        self.unused = nn.Linear(3, 5)


class ManyTinyLayers(TinyModel):
    """A long chain of small layers: what a step costs beyond arithmetic shows here."""

    def __init__(self, layers: int = 33) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.VALUES, self.VALUES) for _ in range(layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs)) / len(self.layers)
        return F.mse_loss(inputs, targets)


def build(model_class: Callable[..., Model], *args: object, dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """Return `model_class(*args)` with weights drawn from `seed` in float64 and then rounded to `dtype`.

    The random state of the caller is left as it was.
    """
    before = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            torch.set_default_dtype(torch.float64)
            return model_class(*args).to(dtype)
    finally:
        torch.set_default_dtype(before)


def make_batches(
    model: TinyModel, steps: int, micro_batches: int = 1, world_size: int = 1, rows: int = 4, seed: int = 1
) -> Batches:
    """Return `batches[step][micro_batch][rank]`, all different, each of `rows` rows."""
    seeds = iter(range(seed * 1_000_003, (seed + 1) * 1_000_003))
    return [
        [[model.batch(rows, next(seeds)) for _ in range(world_size)] for _ in range(micro_batches)] for _ in range(steps)
    ]


def cast_batches(batches: Batches, dtype: torch.dtype) -> Batches:
    """Return `batches` with floating-point tensors in `dtype` and all others as they are."""
    return [
        [[tuple(t.to(dtype) if t.is_floating_point() else t for t in batch) for batch in micro] for micro in step]
        for step in batches
    ]


def _tokens(vocabulary: int, rows: int, seed: int, positions: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(vocabulary, (rows, positions), generator=generator),)
