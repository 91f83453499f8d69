"""The original's optimizer state made from any source: whole (no ZeRO), in flat shards (stages 1 and 2), in padded ones (3).

    stages 1, 2   one flat tensor per parameter group and rank
    stage 3       one flat tensor per sub-group and rank; a group is cut into sub-groups by `sub_group_size`

A flat tensor is read from the source while it is written, piece by piece of parameters. Where the pieces lie is
`original.zero_layout`'s business. Does not live here: files (`to_stages`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.checkpoint.disk.names import optimizer_tensor, split_optimizer_tensor
from deepspeed.checkpoint.original.pickles import StreamedTensor
from deepspeed.checkpoint.original.stand_ins import FragmentAddress
from deepspeed.checkpoint.original.writing.model_states import streamed
from deepspeed.checkpoint.original.writing.weights import Weights
from deepspeed.checkpoint.original.zero_layout import Place, places_by_order, places_of_padded, shard_numel
from deepspeed.checkpoint.source import CheckpointSource, OptimizerState
from deepspeed.errors import CheckpointError

__all__ = ["DEFAULT_SUB_GROUP_NUMEL", "SourceOptimizer", "cut_into_sub_groups"]

DEFAULT_SUB_GROUP_NUMEL = 1_000_000_000

_ALIGNMENT_NUMEL = 2
"""A group is padded to a multiple of this many elements per rank."""

_WITH_WHOLE_STEPS = ("Fused", "DeepSpeed")
"""Optimizers of these names keep `step` as a number; torch's keep a tensor."""


class Piece(NamedTuple):
    """Elements `[param_start, param_start + numel)` of parameter `name`, at `start` of a rank's flat tensor."""

    name: str
    param_start: int
    start: int
    numel: int


@dataclass(frozen=True)
class FlatShard:
    """What one rank holds of a (sub-)group: `numel` elements, the last `padding_numel` of which are no parameter's."""

    pieces: list[Piece]
    numel: int
    padding_numel: int

    @property
    def slice_mapping(self) -> OrderedDict[str, FragmentAddress]:
        """Where each parameter lies, as the original states it."""
        return OrderedDict((p.name, FragmentAddress(numel=p.numel, start=p.start)) for p in self.pieces)


def cut_into_sub_groups(numels: Mapping[str, int], world_size: int, sub_group_numel: int) -> list[list[str]]:
    """Sub-groups of a parameter group at stage 3: one ends with the parameter that makes its shard large enough.

    Args:
        numels: parameters in order, with their numbers of elements.
        world_size: ranks.
        sub_group_numel: elements of one rank's shard that end a sub-group (`sub_group_size`).
    """
    cut: list[list[str]] = [[]]
    filled = 0
    for name, numel in numels.items():
        if filled >= sub_group_numel:
            cut.append([])
            filled = 0
        cut[-1].append(name)
        filled += shard_numel(numel, world_size)
    return cut


def flat_shards(numels: Mapping[str, int], world_size: int) -> list[FlatShard]:
    """A group at stages 1 and 2: its shard on each rank."""
    total = sum(numels.values())
    numel = shard_numel(total, _ALIGNMENT_NUMEL * world_size) * _ALIGNMENT_NUMEL
    pieces = _pieces_of_ranks(places_by_order(numels, [numel] * world_size), world_size)
    return [
        FlatShard(pieces[rank], numel, padding_numel=min(numel, max(0, (rank + 1) * numel - total)))
        for rank in range(world_size)
    ]


def padded_shards(numels: Mapping[str, int], world_size: int) -> list[FlatShard]:
    """A sub-group at stage 3: its shard on each rank. Padding lies after every parameter and counts for none."""
    numel = sum(shard_numel(numel, world_size) for numel in numels.values())
    pieces = _pieces_of_ranks(places_of_padded(numels, world_size), world_size)
    return [FlatShard(pieces[rank], numel, padding_numel=0) for rank in range(world_size)]


def _pieces_of_ranks(places: Mapping[str, Sequence[Place]], world_size: int) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for name, of_parameter in places.items():
        done = 0
        for place in of_parameter:
            pieces[place.rank].append(Piece(name, done, place.start, place.numel))
            done += place.numel
    return pieces


class SourceOptimizer:
    """The optimizer of a source, in the forms of the original.

    Args:
        source: the checkpoint.
        weights: its weights by kind.
        state: its optimizer.

    Raises:
        CheckpointError: the source does not say which parameters form each group.
    """

    def __init__(self, source: CheckpointSource, weights: Weights, state: OptimizerState) -> None:
        if len(weights.groups) != len(state["groups"]):
            raise CheckpointError(
                f"checkpoint {source.folder} has {len(state['groups'])} parameter groups but does not say which parameters "
                "are in each, which the original's files must. Load it into an engine, save it there and export that."
            )
        self._source = source
        self._weights = weights
        self._state = state
        self._has_whole_steps = (state["name"] or "").startswith(_WITH_WHOLE_STEPS)
        self._keys: dict[str, list[str]] = {}
        for tensor in source.names("optimizer/"):
            parameter, key = split_optimizer_tensor(tensor)
            self._keys.setdefault(parameter, []).append(key)

    def numels(self, names: Sequence[str]) -> dict[str, int]:
        """Elements of each parameter."""
        return {name: torch.Size(self._source.shape(self._weights.tensors[name])).numel() for name in names}

    # -- no ZeRO ------------------------------------------------------------------------------------------------------

    def whole_state(self) -> dict[str, Any]:
        """State dict of the inner optimizer, one entry per parameter."""
        state: dict[int, Any] = {}
        for number, name in enumerate(self._weights.trained):
            tensors = {key: streamed_as_is(self._source, optimizer_tensor(name, key)) for key in self._keys.get(name, [])}
            entry = self._scalars(self._state["scalars"].get(name, {})) | tensors
            if entry:
                state[number] = entry
        return {"state": state, "param_groups": self._param_groups([len(names) for names in self._weights.groups])}

    def whole_masters(self) -> list[list[StreamedTensor]]:
        """fp32 weights of each group."""
        return [[self._master(name) for name in names] for names in self._weights.groups]

    # -- ZeRO ---------------------------------------------------------------------------------------------------------

    def flat_state(self, shards: Sequence[tuple[Sequence[str], FlatShard]], of_groups: Sequence[int]) -> dict[str, Any]:
        """State dict of the inner optimizer of one rank, one entry per flat tensor.

        Args:
            shards: names of each flat tensor's parameters, and what this rank has of them.
            of_groups: flat tensors of each parameter group.

        Raises:
            CheckpointError: parameters that share a flat tensor differ in what it has once, or have state of another shape.
        """
        state: dict[int, Any] = {}
        for number, (names, shard) in enumerate(shards):
            entry = self._scalars(self._common_scalars(names))
            for key in dict.fromkeys(key for name in names for key in self._keys.get(name, [])):
                entry[key] = self._flat_key(names, key, shard)
            if entry:
                state[number] = entry
        return {"state": state, "param_groups": self._param_groups(of_groups)}

    def flat_master(self, shard: FlatShard, numel: int) -> StreamedTensor:
        """The first `numel` elements of a rank's fp32 weights."""
        return _flat(self._source, self._weights.tensors.get, shard.pieces, numel, torch.float32)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _flat_key(self, names: Sequence[str], key: str, shard: FlatShard) -> StreamedTensor:
        tensors = {name: optimizer_tensor(name, key) for name in names if key in self._keys.get(name, [])}
        for name, tensor in tensors.items():
            shape, expected = self._source.shape(tensor), self._source.shape(self._weights.tensors[name])
            if shape != expected:
                raise CheckpointError(
                    f"optimizer state {key!r} of {name!r} has shape {shape} and the parameter {expected}; the original's "
                    "flat shards hold only state of the parameter's shape. Export for ZeRO stage 0."
                )
        dtype = self._source.dtype(next(iter(tensors.values())))
        return _flat(self._source, tensors.get, shard.pieces, shard.numel, dtype)

    def _common_scalars(self, names: Sequence[str]) -> dict[str, Any]:
        """What the parameters of a flat tensor have in common; those without any state had no gradient yet."""
        known = {name: self._state["scalars"][name] for name in names if self._state["scalars"].get(name)}
        first = next(iter(known), None)
        if first is None:
            return {}
        for name, scalars in known.items():
            if dict(scalars) != dict(known[first]):
                raise CheckpointError(
                    f"the optimizer's numbers are {dict(known[first])} for {first!r} and {dict(scalars)} for {name!r}. They "
                    "share a flat shard in the original, which has room for one of them. Export for ZeRO stage 0."
                )
        return dict(known[first])

    def _scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        as_stored = dict(scalars)
        if "step" in as_stored:
            step = as_stored["step"]
            as_stored["step"] = int(step) if self._has_whole_steps else torch.tensor(float(step))
        return as_stored

    def _param_groups(self, counts: Sequence[int]) -> list[dict[str, Any]]:
        groups, first = [], 0
        for group, count in zip(self._state["groups"], counts, strict=True):
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        return groups

    def _master(self, name: str) -> StreamedTensor:
        return streamed(self._source, self._weights.tensors[name], torch.float32)


def streamed_as_is(source: CheckpointSource, tensor: str) -> StreamedTensor:
    """A tensor of the source in its own type, read while it is written."""
    return streamed(source, tensor, source.dtype(tensor))


def _flat(
    source: CheckpointSource,
    tensor_of: Callable[[str], str | None],
    pieces: Sequence[Piece],
    numel: int,
    dtype: torch.dtype,
) -> StreamedTensor:
    """`numel` elements made of pieces in order of their starts; zeros where there is no piece, or no tensor for it."""
    starts = [piece.start for piece in pieces]

    def fill(start: int, out: Tensor) -> None:
        out.zero_()
        stop = start + out.numel()
        for piece in pieces[max(0, bisect_right(starts, start) - 1) :]:
            if piece.start >= stop:
                break
            tensor = tensor_of(piece.name)
            low, high = max(start, piece.start), min(stop, piece.start + piece.numel)
            if tensor is not None and low < high:
                source.read(tensor, piece.param_start + low - piece.start, out=out[low - start : high - start])

    return StreamedTensor((numel,), dtype, fill)
