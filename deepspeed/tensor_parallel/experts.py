"""Stacked experts whose inner width tensor ranks share: every rank has a part of every expert.

    gate_up_proj (E, 2I, M)  rows of gate and of up     --.
    its bias     (E, 2I)     the same entries             +--> the model's own forward on parts --all-reduce--> output
    down_proj    (E, M, I)   columns                    --'    (T, M), terms of a sum
    its bias     (E, M)      whole; added on rank 0 alone

Letters: `E` experts, `T` tokens, `M` width of a token, `I` inner width. All ranks see the same tokens and the same choice of
experts. Every expert's output is a sum over `I`, and so is what they make together: one all-reduce ends the layer. Backward
sums the gradients of the tokens and of the weights of the choice, to which each rank has a term.

Lives here: the class, which spans a rank has, and how a module becomes one. Does not live here: telling stacked experts
(`moe.stacked`), whether they are cut (`planning`), whole experts over ranks (`moe.auto_ep`). Lists of expert modules are
MLPs like others (`search`).

[Note: tried first] Weights of the right shapes do not say what forward does with them (gate and up side by side or in turns,
a norm after the sum). So two tokens go through the whole module and through all parts before anything is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deepspeed.comm import differentiable
from deepspeed.errors import UsageError
from deepspeed.moe.stacked import NotStackedError, Stacks, is_close, stacks_of, two_tokens
from deepspeed.sharding.cut import Cut
from deepspeed.tensor_parallel.heads import Parts, even_parts
from deepspeed.tensor_parallel.layers import CutLayer, cut_class, part_of, sum_into
from deepspeed.topology.mesh import AxisGroup

__all__ = ["ExpertParts", "StackedExperts", "become_experts", "expert_parts", "find_stacked_experts"]

_ALIGNED = 8
"""Grouped products of 16-bit numbers want rows of a multiple of 16 bytes."""


@dataclass(frozen=True)
class ExpertParts:
    """How a module of stacked experts is cut.

    Attributes:
        stacks: what it is made of.
        cuts: by name of the parameter; the bias of the last projection, which stays whole, is not among them.
    """

    stacks: Stacks
    cuts: Mapping[str, Cut]


class StackedExperts(CutLayer):
    """A model's module of stacked experts with this rank's part of each; made by `become_experts`."""

    stacks: Stacks

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return what the module does, alike on all ranks, which all call it with the same.

        Args:
            *args: tokens (T, M); the experts of each, (T, K); their weights, (T, K).
            **kwargs: the same by the names that the model's own module gives them.
        """
        tokens, _, weights = self.stacks.arguments
        given = {**dict(zip(self.stacks.arguments, args, strict=False)), **kwargs}
        for name in (tokens, weights):
            if torch.is_grad_enabled() and given[name].requires_grad:
                given[name] = differentiable.copy(given[name], self.axis.group)
        with self._one_bias():
            terms: Tensor = super().forward(**given)
        return sum_into(terms, self.axis)

    @contextmanager
    def _one_bias(self) -> Iterator[None]:
        """Meanwhile the bias of the last projection is 0 on all ranks but the first; its gradient is whole on all."""
        name = f"{self.stacks.last}_bias"
        bias = self._parameters.get(name)
        if bias is None:
            yield
            return
        self._parameters[name] = _OnFirst.apply(bias, self.axis.rank == 0)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._parameters[name] = bias


class _OnFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_first: bool) -> Tensor:
        return bias.view_as(bias) if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None  # of the output, which is alike on all ranks


def find_stacked_experts(modules: Mapping[str, nn.Module]) -> tuple[dict[str, Stacks], dict[str, str]]:
    """(Modules of stacked experts, by name; those that go by the name of experts and are none, with the reason)."""
    found: dict[str, Stacks] = {}
    unfit: dict[str, str] = {}
    for name, module in modules.items():
        is_spread = getattr(module, "is_deepspeed_moe_layer", False)
        if is_spread or not any(param is not None and param.dim() == 3 for param in module._parameters.values()):
            continue
        try:
            found[name] = stacks_of(module)
        except NotStackedError as reason:
            if name.rpartition(".")[2] == "experts":
                unfit[name] = str(reason)
    return found, unfit


def expert_parts(module: nn.Module, stacks: Stacks, ranks: int, grain: int) -> ExpertParts:
    """Share the inner width of all experts out, in whole grains as far as they go. The same on all ranks."""
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters(recurse=False)}
    of_inputs, of_outputs = (1, 2) if stacks.is_transposed else (2, 1)
    inner = shapes[stacks.last][of_inputs]
    if inner % _ALIGNED == 0 and inner >= _ALIGNED * ranks:
        grain = lcm(grain, _ALIGNED)
    entries = _entries(module, stacks, inner, ranks, grain)
    cuts = {
        stacks.first: Cut(shapes[stacks.first], of_outputs, entries),
        stacks.last: Cut(shapes[stacks.last], of_inputs, even_parts(inner, ranks, grain)),
    }
    bias = f"{stacks.first}_bias"
    if bias in shapes:
        cuts[bias] = Cut(shapes[bias], 1, entries)
    return ExpertParts(stacks, cuts)


def _entries(module: nn.Module, stacks: Stacks, inner: int, ranks: int, grain: int) -> Parts:
    """What each rank has of the outputs of the first projection."""
    if not stacks.has_gate:
        return even_parts(inner, ranks, grain)
    if getattr(module, "is_concatenated", True):
        return even_parts(inner, ranks, grain, (inner, inner))
    return even_parts(2 * inner, ranks, 2 * grain)  # gate and up in turns: whole pairs


def become_experts(name: str, module: nn.Module, parts: ExpertParts, axis: AxisGroup) -> None:
    """Make `module` a `StackedExperts` that keeps this rank's part of its parameters. Nothing is sent.

    Args:
        name: of the module, for messages.
        module: with all of its weights, the same on all ranks.
        parts: how it is cut.
        axis: whose ranks have the parts.

    Raises:
        UsageError: what parts compute does not add up to what the whole computes, or there are no values to try it on.
    """
    _try(name, module, parts, axis.size)
    for key, cut in parts.cuts.items():
        param = module._parameters[key]
        assert param is not None  # has a cut
        if tuple(param.shape) == cut.shape:  # else another layer has the same tensor, and has cut it
            param.data = part_of(param.detach(), cut, axis.rank)
    module.__class__ = cut_class(cast("Any", StackedExperts), cast("Any", type(module)))
    made = cast("StackedExperts", module)
    made.axis, made._cuts, made._sharers, made.stacks = axis, dict(parts.cuts), {}, parts.stacks


def _try(name: str, module: nn.Module, parts: ExpertParts, ranks: int) -> None:
    """See [Note: tried first]."""
    if any(tuple(module._parameters[key].shape) != cut.shape for key, cut in parts.cuts.items()):  # type: ignore[union-attr]
        return  # shared with a layer that was tried
    sample = two_tokens(module, parts.stacks)
    bias = module._parameters.get(f"{parts.stacks.last}_bias")
    with torch.no_grad():
        expected = module(*sample)
        found = torch.zeros_like(expected)
        for rank in range(ranks):
            held = {key: part_of(module._parameters[key], cut, rank) for key, cut in parts.cuts.items()}  # type: ignore[arg-type]
            if bias is not None and rank:
                held[f"{parts.stacks.last}_bias"] = torch.zeros_like(bias)
            found += functional_call(module, held, sample)
    if not is_close(found, expected):
        raise UsageError(
            f"tensor_parallel: {type(module).__name__} ({name!r}) has weights like stacked experts, but parts of them do "
            "not add up to what it computes. Leave its weights whole (layer_specs with partition_type 'skip' for "
            f"'{parts.stacks.first}|{parts.stacks.last}'), or spread whole experts over ranks with expert_parallel."
        )
