"""A small model as layers of a pipeline, and the same model as one plain module under the same names.

    layers(tied=True)    [embed]  [block 0] [block 1] ...  [norm]  [embed as head]       for PipelineModule
    Whole(tied=True)     the same functions, one after another, and the loss              for `tests.support.reference`

Layers take their first values from their place alone, so a stage that builds some of them has what the whole model has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepspeed
from deepspeed.engine.pipeline import PipelineEngine
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.specs import LayerSpec, TiedLayerSpec
from tests.support.models import TinyModel

WIDTH = 6


def _settle(module: nn.Module, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    module.to(dtype)
    with torch.no_grad():
        for param in module.parameters():
            values = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3
            param.copy_(values + (1.0 if param.dim() == 1 else 0.0))


class Block(nn.Module):
    """Linear, tanh, linear, added to what came in."""

    def __init__(self, seed: int, dtype: torch.dtype, width: int = WIDTH) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        _settle(self, seed, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.narrow(torch.tanh(self.widen(hidden)))


class Norm(nn.LayerNorm):
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(WIDTH)
        _settle(self, seed, dtype)


class Embed(nn.Embedding):
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(TinyModel.VOCABULARY, WIDTH)
        _settle(self, seed, dtype)


class Head(nn.Linear):
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(WIDTH, TinyModel.VOCABULARY, bias=False)
        _settle(self, seed, dtype)


def project(embed: Embed, hidden: Tensor) -> Tensor:
    """The embedding as output layer."""
    return F.linear(hidden, embed.weight)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy, in fp32 at least."""
    logits = logits.flatten(0, 1)
    return F.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, labels.flatten())


def layers(
    blocks: int = 3, *, tied: bool = True, dtype: torch.dtype = torch.float64, frozen: Sequence[int] = ()
) -> list[Any]:
    """Layers for a `PipelineModule`; blocks numbered in `frozen` do not train."""
    block = [LayerSpec(FrozenBlock if n in frozen else Block, n, dtype) for n in range(blocks)]
    if tied:
        ends = [TiedLayerSpec("embed", Embed, 90, dtype), TiedLayerSpec("embed", Embed, 90, dtype, forward_fn=project)]
    else:
        ends = [LayerSpec(Embed, 90, dtype), LayerSpec(Head, 91, dtype)]
    return [ends[0], *block, LayerSpec(Norm, 92, dtype), ends[1]]


class FrozenBlock(Block):
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed, dtype)
        self.requires_grad_(False)


class Whole(TinyModel):
    """The model of `layers` in one piece; `model(tokens, labels)` is its loss. Its names are those of the pipeline."""

    def __init__(self, described: Sequence[Any], loss_fn: Callable[[Any, Any], Tensor] = token_loss) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.tied_modules = nn.ModuleDict()
        self._functions: list[Callable[[Any], Any]] = []
        for number, layer in enumerate(described):
            self._functions.append(self._function(number, layer))

    def _function(self, number: int, layer: Any) -> Callable[[Any], Any]:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module, forward = self.tied_modules[layer.key], layer.forward_fn
            return module if forward is None else lambda inputs: forward(module, inputs)
        built = layer.build() if isinstance(layer, LayerSpec) else copy.deepcopy(layer)
        if isinstance(built, nn.Module):
            self.add_module(str(number), built)
        function: Callable[[Any], Any] = built
        return function

    def logits(self, inputs: Any) -> Any:
        for function in self._functions:
            inputs = function(inputs)
        return inputs

    def forward(self, inputs: Any, labels: Any) -> Tensor:
        return self.loss_fn(self.logits(inputs), labels)


def token_batches(steps: int, micro_batches: int, ranks: int, rows: int = 2, lengths: Sequence[int] = (5,)) -> list[Any]:
    """`batches[step][micro_batch][rank]` of (tokens, labels); micro-batches take turns at `lengths`."""
    generator = torch.Generator().manual_seed(7)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(TinyModel.VOCABULARY, (rows, lengths[number % len(lengths)] + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return [
        [[batch(step * micro_batches + micro) for _ in range(ranks)] for micro in range(micro_batches)]
        for step in range(steps)
    ]


def make_pipeline(described: Sequence[Any], stages: int, settings: dict[str, Any], **options: Any) -> PipelineEngine:
    """An engine over `described`; options of `initialize` are `optimizer` and `lr_scheduler`, others the module's."""
    arguments = {name: options.pop(name) for name in ("optimizer", "lr_scheduler", "training_data") if name in options}
    net = PipelineModule(layers=list(described), **{"num_stages": stages, "loss_fn": token_loss, **options})
    engine = deepspeed.initialize(model=net, config=settings, **arguments)[0]
    assert isinstance(engine, PipelineEngine)
    return engine


def own(batches: Sequence[Sequence[Sequence[Any]]], rank: int) -> Iterator[list[Any]]:
    """One list of micro-batches per step, those of one data-parallel rank."""
    return ([micro_batch[rank] for micro_batch in step] for step in batches)


def train_pipeline(engine: PipelineEngine, batches: Sequence[Sequence[Sequence[Any]]]) -> list[float]:
    """The losses of one `train_batch` per step."""
    return [engine.train_batch(iter(step)).item() for step in own(batches, engine.get_data_parallel_rank())]
