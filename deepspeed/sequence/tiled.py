"""Long sequences in tiles: what a position-wise part of a model computes on the way lives for one tile at a time.

    TiledMLP.apply(fn, mlp, x, shards)                   y = fn(mlp, x), tile by tile
    TiledFusedLogitsLoss.apply(fn, head, x, y, ...)      the loss of fn(head, x, y); logits of one tile live at a time
    sequence_tiled_compute(fn, seqlen, shards, ...)      any function of keyword arguments

All three give the numbers of the plain call but for the order of sums, for lengths that do not divide by the tiles too, at
every ZeRO stage, under activation checkpointing, autocast and `torch.no_grad`. Each parameter gets its gradient once, after
the last tile; `compute_params` and the attribute `ds_grad_is_ready`, by which other implementations say so, are not needed
and taken for compatibility. (ALST, arXiv:2506.13996, sections 3.1 and 3.2.)

Lives here: the published names. Does not live here: the machinery (`tiles`), whole models (`tiled_decoder`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepspeed.errors import ArgumentError
from deepspeed.sequence.tiles import (
    FilledGradient,
    Join,
    JoinTiles,
    Leaves,
    ReduceTiles,
    Sums,
    hooks_out_of_force,
    leaves_of,
    run_tiles,
    scaled,
    tile_of,
    tile_ranges,
    without_autocast,
)

__all__ = ["SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute"]

Reduction = Literal["mean", "sum"]


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[nn.Parameter] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Reduction | None = "mean",
) -> Tensor:
    """`fn(**kwargs_to_shard, **kwargs_to_pass)`, tile by tile along dimension 1 of what is sharded; run again in backward.

    Args:
        fn: computes a tile; position-wise along the sequence. It is called again in backward and must compute the same.
        seqlen: length of dimension 1 of every tensor in `kwargs_to_shard`.
        shards: tiles; at most `seqlen` are made, as even as can be.
        kwargs_to_shard: tensors (batch, seqlen, ...); what is None is passed as None.
        kwargs_to_pass: what each tile gets as it is. A tensor among them gets its gradient, summed over tiles.
        grad_requiring_tensor_key: key of `kwargs_to_shard` of the main input. Others get their gradients as well.
        compute_params: taken for compatibility; see the module.
        output_unshard_dimension: dimension of the sequence in the output, where outputs are joined.
        output_reduction: None joins outputs. "mean" and "sum" are for one number per tile: the mean weighs tiles by their
            tokens, which is exact for means over all tokens (for a loss with `ignore_index`: `TiledFusedLogitsLoss`).

    Raises:
        ArgumentError: lengths that are not `seqlen`, an unknown key or reduction, an output that does not fit.
    """
    tensors = {key: value for key, value in kwargs_to_shard.items() if isinstance(value, Tensor)}
    _check_key(grad_requiring_tensor_key, tensors)
    for key, tensor in tensors.items():
        if tensor.dim() < 2 or tensor.size(1) != seqlen:
            raise ArgumentError(
                f"kwargs_to_shard[{key!r}] has shape {tuple(tensor.shape)}; needed seqlen={seqlen} in dimension 1. Move it "
                "to kwargs_to_pass, or bring the sequence to dimension 1."
            )
    others = {key: value for key, value in kwargs_to_shard.items() if key not in tensors}
    passed = {key: value for key, value in kwargs_to_pass.items() if _is_differentiable(value)}
    others |= {key: value for key, value in kwargs_to_pass.items() if key not in passed}
    keys = [*tensors, *passed]

    def run(values: Sequence[Tensor]) -> Tensor:
        return fn(**dict(zip(keys, values, strict=True)), **others)

    join = _join(output_reduction, output_unshard_dimension, seqlen, shards)
    return run_tiles(run, list(tensors.values()), list(passed.values()), dim=1, tiles=shards, join=join)


def _check_key(key: str, tensors: Mapping[str, Tensor]) -> None:
    if key not in tensors:
        near = difflib.get_close_matches(key, tensors, 1)
        raise ArgumentError(
            f"grad_requiring_tensor_key={key!r} is no tensor of kwargs_to_shard, which has {sorted(tensors)}. "
            f"Give {near[0] if near else 'one of these'!r}."
        )


def _is_differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf


def _join(reduction: Reduction | None, dim: int, length: int, tiles: int) -> Join:
    if reduction is None:
        return JoinTiles(dim, length)
    sizes = [stop - start for start, stop in tile_ranges(length, tiles)]
    if reduction == "mean":
        return ReduceTiles([size / length if length else 1.0 for size in sizes])
    if reduction == "sum":
        return ReduceTiles([1.0] * len(sizes))
    raise ArgumentError(f'output_reduction={reduction!r}: needed "mean", "sum" or None. Choose one of them.')


class SequenceTiledCompute:
    """`sequence_tiled_compute` with arguments as keys and values."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[nn.Parameter] | None,
        output_unshard_dimension: int,
        output_reduction: Reduction | None,
        *args: Any,
    ) -> Tensor:
        """Run `sequence_tiled_compute`; `args` are the values of `keys_to_shard`, then those of `keys_to_pass`.

        Raises:
            ArgumentError: as many values as keys are needed; and what `sequence_tiled_compute` raises.
        """
        if len(args) != len(keys_to_shard) + len(keys_to_pass):
            raise ArgumentError(
                f"SequenceTiledCompute.apply() got {len(args)} values for {len(keys_to_shard)} keys to shard and "
                f"{len(keys_to_pass)} to pass. Give one value for each key, in that order."
            )
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, args, strict=False)),
            dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """A position-wise module in tiles."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """`fn(self, x)`, tile by tile along the last dimension but one.

        Args:
            fn: usually the `forward` of the module's class; position-wise along the sequence.
            self: its first argument, the module.
            x: (..., sequence, width).
            shards: tiles; at most as many as there are tokens.
            compute_params: taken for compatibility; see the module.

        Raises:
            ArgumentError: the output is no tensor (..., sequence, any width).
        """
        if x.dim() < 2:
            raise ArgumentError(f"TiledMLP: x has shape {tuple(x.shape)}; needed (..., sequence, width). Add a dimension.")
        dim = x.dim() - 2

        def run(tensors: Sequence[Tensor]) -> Tensor:
            output = fn(self, tensors[0])
            if not isinstance(output, Tensor):
                raise ArgumentError(
                    f"TiledMLP: fn gave {type(output).__name__}; needed one tensor. Wrap a function that gives several, for "
                    "example with sequence_tiled_compute once for each."
                )
            return output

        return run_tiles(run, [x], [], dim=dim, tiles=shards, join=JoinTiles(dim, x.size(dim)))


class TiledFusedLogitsLoss:
    """A loss over a head's outputs in tiles, whose gradient is made in forward.

    No logits are kept between forward and backward, and none are computed twice: a tile's backward follows its forward.
    What is kept is the gradient of `x` and those of the parameters, not yet divided by the number of tokens nor
    multiplied by the loss scale, so that 16-bit gradients neither vanish nor overflow.
    """

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Iterable[nn.Parameter] | None = None,
        output_reduction: Reduction = "mean",
        ignore_index: int = -100,
    ) -> Tensor:
        """`fn(self, x, y)`, or `fn(self, x, y, mask)` where there is one, tile by tile along dimension 1.

        With "mean", `fn` gives the mean over those of its positions that count: where `y` holds integers, those that are
        not `ignore_index`; else all. The result is the mean over all that count: tiles weigh by their number. A tile
        where none counts adds nothing, whatever `fn` gives, and neither does a sequence where none does: the loss is 0.

        Args:
            fn: gives one number for a tile.
            self: its first argument, usually the model.
            x: (batch, sequence, ...), for example hidden states.
            y: (batch, sequence, ...), for example labels that are shifted already.
            mask: (batch, sequence, ...), or None.
            shards: tiles; at most as many as there are tokens.
            compute_params: taken for compatibility; see the module.
            output_reduction: "mean" or "sum", of what `fn` gives.
            ignore_index: labels that do not count.

        Raises:
            ArgumentError: shapes that do not go together, an unknown reduction, or more than one number from `fn`.
        """
        if output_reduction not in ("mean", "sum"):
            raise ArgumentError(f'output_reduction={output_reduction!r}: needed "mean" or "sum". Choose one of them.')
        for name, tensor in (("y", y), ("mask", mask)):
            if tensor is not None and (x.dim() < 2 or tensor.shape[:2] != x.shape[:2]):
                raise ArgumentError(
                    f"TiledFusedLogitsLoss: x has shape {tuple(x.shape)} and {name} has {tuple(tensor.shape)}; needed the "
                    "same (batch, sequence, ...). Shift labels before, and keep the sequence in dimension 1."
                )
        counts = _Counts(y, ignore_index) if output_reduction == "mean" else None
        return _LossTiles(fn, self, [x, y, *([] if mask is None else [mask])], counts).run(shards)


class _Counts:
    """How many positions of a tile count for the mean; without waiting for the device."""

    def __init__(self, targets: Tensor, ignore_index: int) -> None:
        self._has_labels = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
        self._ignore_index = ignore_index

    def of(self, targets: Tensor) -> Tensor:
        """The number, a tensor without dimensions on the device of the tile's targets."""
        if self._has_labels:
            return (targets != self._ignore_index).sum()
        return torch.tensor(targets.size(0) * targets.size(1), device=targets.device)

    def filled(self, targets: Tensor, count: Tensor) -> Tensor:
        """The targets, with one label more where none counts: a mean over none would spoil the gradients by 0 / 0."""
        if not self._has_labels:
            return targets
        is_first = torch.zeros_like(targets, dtype=torch.bool)
        is_first.view(-1)[:1] = True
        return targets.masked_fill(is_first & (count == 0), 0)


class _LossTiles:
    """One call of `TiledFusedLogitsLoss`."""

    def __init__(self, fn: Callable[..., Tensor], first: Any, tensors: Sequence[Tensor], counts: _Counts | None) -> None:
        self._fn = fn
        self._first = first
        self._tensors = tensors
        self._counts = counts
        self._total: Tensor | None = None
        self._count: Tensor | None = None

    def run(self, tiles: int) -> Tensor:
        ranges = tile_ranges(self._tensors[0].size(1), tiles)
        if not torch.is_grad_enabled():
            for bounds in ranges:
                self._tile([tile_of(tensor, 1, bounds) for tensor in self._tensors])
            return self._loss()
        wants = [tensor.requires_grad for tensor in self._tensors]
        filled = [FilledGradient(tensor.detach(), 1) for tensor in self._tensors]
        leaves, sums = Leaves(), _SumsByLeaf()
        for bounds in ranges:
            inputs = [
                tile_of(tensor.detach(), 1, bounds).requires_grad_(want)
                for tensor, want in zip(self._tensors, wants, strict=True)
            ]
            weighted = self._tile(inputs)
            leaves.add(leaves_of(weighted), without=inputs)
            asked = [tensor for tensor, want in zip(inputs, wants, strict=True) if want]
            grads = _grads(weighted, asked, leaves.tensors)
            del weighted
            found = iter(grads)
            for each, want in zip(filled, wants, strict=True):
                if want:
                    each.put(next(found), bounds)
            sums.add(leaves.tensors, list(found))
        of_tensors = [each.whole for each in filled]
        return self._attach(of_tensors, leaves.tensors, sums.of(leaves.tensors))

    def _tile(self, inputs: list[Tensor]) -> Tensor:
        """The tile's loss times its number of positions (for a sum: once), with its graph; its value is added up."""
        weight = None
        if self._counts is not None:
            weight = self._counts.of(inputs[1])
            inputs = [inputs[0], self._counts.filled(inputs[1], weight), *inputs[2:]]
        loss = self._fn(self._first, *inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ArgumentError(
                f"TiledFusedLogitsLoss: fn gave {shape}; needed one number. Reduce the loss of a tile in fn."
            )
        if weight is not None:
            loss = loss * weight
            count = weight.detach()
            self._count = count if self._count is None else self._count + count
        value = loss.detach()
        self._total = value if self._total is None else self._total + value
        return loss

    def _loss(self) -> Tensor:
        assert self._total is not None  # there is at least one tile
        return self._total if self._count is None else self._total / self._count.clamp(min=1)

    def _attach(self, of_tensors: list[Tensor | None], leaves: list[Tensor], of_leaves: list[Tensor | None]) -> Tensor:
        pairs = [*zip(self._tensors, of_tensors, strict=True), *zip(leaves, of_leaves, strict=True)]
        known = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        if not known:
            return self._loss()
        count = None if self._count is None else self._count.clamp(min=1)
        inputs, grads = [tensor for tensor, _ in known], [grad for _, grad in known]
        attached: Tensor = _KnownGradients.apply(self._loss(), count, grads, *inputs)  # type: ignore[no-untyped-call]
        return attached


class _SumsByLeaf:
    """`Sums` over leaves that become known as tiles go by."""

    def __init__(self) -> None:
        self._sums: dict[int, Sums] = {}

    def add(self, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        for leaf, grad in zip(leaves, grads, strict=True):
            self._sums.setdefault(id(leaf), Sums([leaf])).add([grad])

    def of(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        return [self._sums[id(leaf)].unrounded()[0] for leaf in leaves]


def _grads(loss: Tensor, tensors: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    wanted = [*tensors, *leaves]
    if not wanted or not loss.requires_grad:
        return [None] * len(wanted)
    with hooks_out_of_force(leaves), without_autocast(loss.device):
        return list(torch.autograd.grad(loss, wanted, torch.ones_like(loss), allow_unused=True))


class _KnownGradients(torch.autograd.Function):
    """A number whose gradients are there: backward multiplies them by its own gradient, divided by `count`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: Tensor | None, grads: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*grads)
        ctx.count = count
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad if ctx.count is None else grad / ctx.count
        grads = [scaled(known, factor, dtype) for known, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, None, *grads
