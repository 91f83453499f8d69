"""Tiny models that each hold one difficulty, with batches to feed them.

Every model returns its loss, a mean over the rows of the batch, from `model(*batch)`, and makes batches with
`model.batch(rows, seed)`. Equal calls give equal models and batches, whatever happened before, so ranks and the
one-process reference build the same thing without talking to each other.
"""

from __future__ import annotations

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
        generator = torch.Generator().manual_seed(seed)
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


def _tokens(vocabulary: int, rows: int, seed: int, positions: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(vocabulary, (rows, positions), generator=generator),)
