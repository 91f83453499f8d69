"""What one model-parallel rank of the original stored: its slice of every tensor, put together over the data-parallel ranks.

    *_model_states.pt    weights in the model's dtype, names and shapes --.
    *_optim_states.pt    flat shards: fp32 masters, optimizer state -------+--> Slice: name -> values, not yet joined
    expert files         weights of experts under their global numbers ---'

[Note: which order counts] At stages 1 and 2 the shards also state where each parameter lies (`param_slice_mappings`). With
`round_robin_gradients` version 0.19.8 states it for the order before the parameters were reordered, which is wrong: the
values lie in the order of `param_shapes`. So places follow from that order, and the statement is not read.

Lives here: ZeRO stages 1 to 3, and what all stages share. Does not live here: the arithmetic (`original.zero_layout`),
optimizer state without ZeRO (`unsharded`), joining slices (`tensor_parallel`). Called by `rank_slices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.original.engine_state import plain_groups, plain_module
from deepspeed.checkpoint.original.reading.assembled import Pieces, Stored
from deepspeed.checkpoint.original.reading.experts import ExpertNames
from deepspeed.checkpoint.original.zero_layout import (
    Place,
    places_by_order,
    places_of_padded,
    shard_numel,
)
from deepspeed.errors import CheckpointDamagedError, CheckpointError

__all__ = ["Slice", "plain", "read_sharded", "read_weights", "stored"]


@dataclass
class Slice:
    """One model-parallel rank's part of the checkpoint, by parameter or buffer name."""

    weights: dict[str, Stored] = field(default_factory=dict)
    """As the model held them, tied names once."""

    masters: dict[str, Stored] = field(default_factory=dict)
    """fp32 values of trained parameters, where the optimizer kept any."""

    optimizer: dict[str, dict[str, Stored]] = field(default_factory=dict)
    """Parameter -> state key -> values."""

    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    members: list[list[str]] = field(default_factory=list)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Element type in the model, also of weights that are not stored as the model held them."""

    has_optimizer: bool = False
    frozen: list[str] = field(default_factory=list)
    has_frozen: bool = True
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied parameters: later names -> first name."""

    refusal: CheckpointError | None = None
    """Why the optimizer's state cannot be given, where it cannot."""

    def add(self, other: Slice) -> None:
        """Take in what another slice has under names that this one has not."""
        self.weights = self.weights | {k: v for k, v in other.weights.items() if k not in self.weights}
        self.masters = self.masters | {k: v for k, v in other.masters.items() if k not in self.masters}
        self.optimizer = self.optimizer | {k: v for k, v in other.optimizer.items() if k not in self.optimizer}
        self.scalars = self.scalars | {k: v for k, v in other.scalars.items() if k not in self.scalars}
        self.dtypes = other.dtypes | self.dtypes
        self.aliases = other.aliases | self.aliases


def stored(tensor: Tensor) -> Stored:
    """A tensor that lies whole in one file."""
    return Stored(tuple(tensor.shape), tensor.dtype, Pieces([tensor.detach().reshape(-1)]))


def plain(value: Any) -> Any:
    """A number out of a tensor of one element; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def read_weights(models: Sequence[Mapping[str, Any]], aliases: Mapping[str, str]) -> dict[str, Stored]:
    """Weights and buffers of a model-parallel rank: whole in `module`, or (ZeRO stage 3) frozen ones in fragments.

    Args:
        models: its model states; at stage 3 those of every data-parallel rank, in order.
        aliases: names to leave out.
    """
    first = models[0]
    module = {name: value for name, value in plain_module(first).items() if name not in aliases}
    elsewhere = {name for shapes in first.get("param_shapes") or () for name in shapes} if len(models) > 1 else set()
    frozen = first.get("frozen_param_fragments") or {}
    weights = {name: stored(value) for name, value in module.items() if name not in elsewhere and name not in frozen}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        if name in frozen and name not in aliases:
            weights[name] = _frozen(name, tuple(shape), models)
    return weights


def _frozen(name: str, shape: tuple[int, ...], models: Sequence[Mapping[str, Any]]) -> Stored:
    fragments = [states["frozen_param_fragments"][name].reshape(-1) for states in models]
    numel = math.prod(shape)
    if len(fragments) > 1 or fragments[0].numel() != numel:
        piece = shard_numel(numel, len(fragments))
        fragments = [part[: max(0, min(piece, numel - rank * piece))] for rank, part in enumerate(fragments)]
    _check_numel(name, shape, sum(part.numel() for part in fragments))
    return Stored(shape, fragments[0].dtype, Pieces(fragments))


# -- ZeRO stages 1 to 3 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FlatGroup:
    """One flat buffer over the ranks that share it: a parameter group, or a sub-group of stage 3."""

    number: int
    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, list[Place]]
    masters: list[Tensor]
    states: list[Mapping[str, Any]]


def read_sharded(model: Mapping[str, Any], shards: Sequence[Mapping[str, Any]], experts: ExpertNames) -> Slice:
    """Masters and optimizer state of a model-parallel rank.

    Args:
        model: its model states (of the first data-parallel rank).
        shards: `optimizer_state_dict` of every data-parallel rank, in order.
        experts: how the ranks' local experts are called globally.

    Raises:
        CheckpointError: the shards are of a kind that is not known.
        CheckpointDamagedError: they do not add up to the shapes that the model states give.
    """
    shapes = model.get("param_shapes")
    if not shapes:
        raise CheckpointError(
            "the model states have no param_shapes, which tell the parameters in the optimizer's shards apart"
        )
    is_whole = "fp32_flat_groups" in shards[0]
    inner_key = "optimizer_state_dict" if is_whole else "base_optimizer_state"
    inners: list[Any] = [shard.get(inner_key) for shard in shards]
    if not all(isinstance(inner, Mapping) and "param_groups" in inner for inner in inners):
        raise CheckpointError(f"{inner_key} of an optimizer's shard is no state dict of a torch optimizer")
    read = _flat_groups_of_stage_3 if is_whole else _flat_groups_of_stages_1_and_2
    flat_groups = list(read(shapes, shards, inners, experts))
    into = Slice(groups=plain_groups(inners[0]["param_groups"]))
    for flat_group in flat_groups:
        _read_flat_group(flat_group, into)
    into.members = _members(inners[0]["param_groups"], flat_groups)
    return into


def _flat_groups_of_stages_1_and_2(
    shapes: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]], inners: Sequence[Any], experts: ExpertNames
) -> Iterator[_FlatGroup]:
    counts = shards[0].get("partition_count") or [len(shards)] * len(shapes)
    for number, local_shapes in enumerate(shapes):
        for expert_rank, ranks in experts.ranks_sharing(len(shards), counts[number]):
            own = [shards[rank] for rank in ranks]
            masters = [shard["single_partition_of_fp32_groups"][number].detach().reshape(-1) for shard in own]
            numels = {name: math.prod(shape) for name, shape in local_shapes.items()}
            paddings = (own[0].get("param_alignment_paddings") or {number: ()})[number]
            places = places_by_order(numels, [master.numel() for master in masters], paddings)
            rename = experts.namer(expert_rank)
            yield _FlatGroup(
                number,
                {rename(name): tuple(shape) for name, shape in local_shapes.items()},
                {rename(name): found for name, found in places.items()},
                masters,
                [_inner_state(inners[rank], number) for rank in ranks],
            )


def _flat_groups_of_stage_3(
    shapes: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]], inners: Sequence[Any], _: ExpertNames
) -> Iterator[_FlatGroup]:
    counts = shards[0].get("partition_count")
    world_size = min(len(shards), counts if isinstance(counts, int) else len(shards))
    for number, own_shapes in enumerate(shapes):
        numels = {name: math.prod(shape) for name, shape in own_shapes.items()}
        yield _FlatGroup(
            number,
            {name: tuple(shape) for name, shape in own_shapes.items()},
            places_of_padded(numels, world_size),
            [shard["fp32_flat_groups"][number].detach().reshape(-1) for shard in shards[:world_size]],
            [_inner_state(inner, number) for inner in inners[:world_size]],
        )


def _inner_state(inner: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """State of the `number`-th flat tensor; empty before the first step."""
    order = [index for group in inner["param_groups"] for index in group["params"]]
    state: Mapping[str, Any] = inner["state"].get(order[number], {}) if number < len(order) else {}
    return state


def _read_flat_group(group: _FlatGroup, into: Slice) -> None:
    for name, shape in group.shapes.items():
        places = group.places.get(name, [])
        _check_numel(name, shape, sum(place.numel for place in places))
        into.masters[name] = _assemble(name, shape, group.masters, places)
        first = group.states[places[0].rank if places else 0]
        _check_keys(name, group.states, places)
        into.scalars[name] = {}
        for key, value in first.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                into.scalars[name][key] = plain(value)
                continue
            if value.numel() < group.masters[places[0].rank if places else 0].numel():
                raise CheckpointError(
                    f"optimizer state {key!r} has {value.numel()} elements for a shard of {group.masters[0].numel()}: it is "
                    "no state per element, so it cannot be told which parameter it belongs to"
                )
            flats = [state[key].reshape(-1) if key in state else value.reshape(-1)[:0] for state in group.states]
            into.optimizer.setdefault(name, {})[key] = _assemble(name, shape, flats, places)


def _assemble(name: str, shape: tuple[int, ...], flats: Sequence[Tensor], places: Sequence[Place]) -> Stored:
    pieces = [flats[place.rank][place.start : place.start + place.numel] for place in places]
    _check_numel(name, shape, sum(piece.numel() for piece in pieces))
    return Stored(shape, flats[0].dtype, Pieces(pieces))


def _check_keys(name: str, states: Sequence[Mapping[str, Any]], places: Sequence[Place]) -> None:
    """Every shard with elements of a parameter has the same keys of its state."""
    every = dict.fromkeys(key for place in places for key in states[place.rank])
    for place in places:
        if lacking := [key for key in every if key not in states[place.rank]]:
            raise CheckpointDamagedError(
                f"the optimizer's shard of rank {place.rank} lacks {', '.join(lacking)} for {name!r}, which others have."
            )


def _members(param_groups: Sequence[Mapping[str, Any]], flat_groups: Sequence[_FlatGroup]) -> list[list[str]]:
    """Names of each parameter group: it lists its flat tensors, which are numbered in order."""
    first = 0
    members = []
    for group in param_groups:
        numbers = range(first, first + len(group["params"]))
        members.append([name for flat in flat_groups if flat.number in numbers for name in flat.shapes])
        first = numbers.stop
    return members


def _check_numel(name: str, shape: tuple[int, ...], numel: int) -> None:
    if numel != math.prod(shape):
        raise CheckpointDamagedError(
            f"the files hold {numel} elements of {name!r}, whose shape is {shape}: they do not belong together, or one is "
            "missing."
        )
