"""Running a stretch of layers: one after the other, seeded where that was asked for, recomputed where that saves memory.

    layers 4 .. 9, interval 2     [4 5] [6 7] [8 9]      the inputs of each bracket stay, the rest is computed again

[Note: seeds] Each pass of a layer is seeded by itself, with a number made of the base seed, the number of the micro-batch
in the whole run and the layer's index: so it depends neither on the cut, nor on what ran in between, nor on a restart.

Lives here: `Stretch`, the pieces it is cut into, and the seeds. Does not live here: which layers a stage has (`module`, the
caller).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.common.pytree import map_tensors

__all__ = ["Recomputation", "Stretch", "pass_seed"]

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class Recomputation:
    """Which layers are computed again in backward."""

    interval: int
    """Layers per piece; 0 recomputes nothing."""
    run: Callable[..., Any]
    """Called as `run(function, *inputs)`, like `deepspeed.checkpointing.checkpoint`."""
    is_worthwhile: Callable[[Sequence[Call]], bool]
    """Whether to recompute a piece made of these layers."""


class Stretch:
    """Consecutive layers of one stage.

    Args:
        calls: what computes each layer.
        first: index of the first in the list of all layers.
        seed: called before each layer with its `pass_seed`; None seeds nothing.
        base_seed: see `PipelineModule`.
    """

    def __init__(self, calls: Sequence[Call], first: int, seed: Callable[[int], Any] | None, base_seed: int) -> None:
        self.calls = list(calls)
        self.first = first
        self._seed = seed
        self._base_seed = base_seed
        self._passes = 0

    def __call__(self, inputs: Any, recomputation: Recomputation, number: int | None = None) -> Any:
        """Pass `inputs` through all layers; a layer gets what the one before gave, as its single argument.

        Args:
            inputs: of the first layer.
            recomputation: what backward computes again.
            number: of the micro-batch, see `pass_seed`; None: passes without a number count, from 0.
        """
        if number is None:
            number, self._passes = self._passes, self._passes + 1
        interval = recomputation.interval
        if interval == 0 or not torch.is_grad_enabled():
            return self._run(0, len(self.calls), number, inputs)
        for start in range(0, len(self.calls), interval):
            stop = min(start + interval, len(self.calls))
            piece = functools.partial(self._run, start, stop, number)
            if recomputation.is_worthwhile(self.calls[start:stop]):
                inputs = _recomputed(piece, recomputation.run, inputs)
            else:
                inputs = piece(inputs)
        return inputs

    def _run(self, start: int, stop: int, number: int, inputs: Any) -> Any:
        for at in range(start, stop):
            if self._seed is not None:
                self._seed(pass_seed(self._base_seed, number, self.first + at))
            inputs = self.calls[at](inputs)
        return inputs


def pass_seed(base_seed: int, number: int, layer: int) -> int:
    """What a layer is seeded with before one of its passes, from 0 to 2**32 - 1. [Note: seeds]

    Args:
        base_seed: see `PipelineModule`.
        number: of the micro-batch in the whole run; those of evaluations are negative.
        layer: index in the list of all layers.
    """
    return int.from_bytes(hashlib.blake2b(f"{base_seed} {number} {layer}".encode(), digest_size=4).digest(), "little")


def _recomputed(piece: Call, run: Callable[..., Any], inputs: Any) -> Any:
    """Hand tensors of a tuple over one by one, since some forms of checkpointing look for tensors among arguments alone.

    Each run gets containers of its own: a layer may change those that it gets, and the second needs them as they were.
    """

    def afresh(given: Any) -> Any:
        return piece(map_tensors(lambda tensor: tensor, given))

    if isinstance(inputs, tuple):
        return run(lambda *given: afresh(given), *inputs)
    return run(afresh, inputs)
