"""Modules that several stages hold a copy of: who holds them, over which ranks they agree, and that they start equal.

    stage 0 [embed] .. stage 3 [embed]      data-parallel rank 0:  ranks 0 and 6       a tie's group joins the ranks of its
     ranks  0  1        ranks  6  7         data-parallel rank 1:  ranks 1 and 7       stages that have the same other places

Parameters stay equal because every copy takes the same step. Buffers that belong to the model's state (persistent ones) are
the first stage's after every batch: what the other uses of the module left in theirs is dropped, since a copy cannot know
in which order one module would have seen them all. Buffers that are no state are each stage's own.

Lives here: the ties of a list of layers, their groups, the first values, buffers. Does not live here: summing gradients,
which the engine does over shards, and `PipelineModule.allreduce_tied_weight_gradients` for those who train without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import PipelineError
from deepspeed.pipe.specs import Layer, TiedLayerSpec
from deepspeed.topology.grid import ProcessTopology
from deepspeed.topology.mesh import AxisGroup, ParallelMesh

__all__ = [
    "TieGroup",
    "TiedBuffers",
    "first_specs",
    "join_ties",
    "require_no_hidden_ties",
    "share_first_values",
    "stages_of_ties",
]


@dataclass(frozen=True)
class TieGroup:
    """One key of `TiedLayerSpec`, seen from one rank."""

    key: str
    stages: tuple[int, ...]
    """Stages that hold a copy, ascending."""
    axis: AxisGroup | None
    """The ranks of these stages that share this rank's other coordinates; None where this rank's stage holds no copy."""

    @property
    def is_owner(self) -> bool:
        """Whether this rank's copy is the first stage's: it gives the first values and counts in norms and checkpoints."""
        return self.axis is not None and self.axis.rank == 0


def first_specs(layers: Sequence[Layer]) -> dict[str, TiedLayerSpec]:
    """Return the first description of every key: the one that copies are built from.

    Raises:
        PipelineError: a key stands for two classes, or has a dot.
    """
    first: dict[str, TiedLayerSpec] = {}
    for layer in layers:
        if isinstance(layer, TiedLayerSpec):
            known = first.setdefault(layer.key, layer)
            if known.typename is not layer.typename:
                raise PipelineError(
                    f"the tied layers {layer.key!r} are {known.typename.__name__} and {layer.typename.__name__}; one key "
                    "stands for one module. Use one class, and forward_fn for the layer that uses it differently."
                )
    dotted = [key for key in first if "." in key or not key]
    if dotted:
        raise PipelineError(f"tied layers have the keys {dotted}; a key becomes a name of a module. Leave dots out.")
    return first


def stages_of_ties(layers: Sequence[Layer], stage_of: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return which stages hold a copy of each key; `stage_of` has the stage of every layer."""
    stages: dict[str, set[int]] = {}
    for layer, stage in zip(layers, stage_of, strict=True):
        if isinstance(layer, TiedLayerSpec):
            stages.setdefault(layer.key, set()).add(stage)
    return {key: tuple(sorted(held)) for key, held in stages.items()}


def join_ties(stages: Mapping[str, tuple[int, ...]], mesh: ParallelMesh) -> tuple[TieGroup, ...]:
    """Make the groups of the ties over several stages, by key; every rank of the world must call it, with the same ties."""
    grid = ProcessTopology(tuple(mesh.sizes), tuple(mesh.sizes.values()))
    made: dict[tuple[int, ...], AxisGroup | None] = {}
    several = {key: held for key, held in sorted(stages.items()) if len(held) > 1}
    for held in several.values():
        if held not in made:
            made[held] = _axis_over(held, grid, mesh)
    return tuple(TieGroup(key, held, made[held]) for key, held in several.items())


def _axis_over(held: tuple[int, ...], grid: ProcessTopology, mesh: ParallelMesh) -> AxisGroup | None:
    pipe = mesh.axis("pipe")
    mine = None
    for ranks in grid.get_axis_comm_lists("pipe"):
        members = [ranks[stage] for stage in held]
        # every rank makes every group, in one order; the axis has that of all stages
        group = comm.kept_group(members) if len(members) < len(ranks) else pipe.group
        if mesh.rank in members:
            mine = AxisGroup(members, mesh.rank, group)
    return mine


def share_first_values(ties: Sequence[TieGroup], modules: Mapping[str, nn.Module]) -> None:
    """Give every copy the owner's parameters and buffers, those that have values; all ranks of each tie must call it."""
    for tie in ties:
        if tie.axis is None:
            continue
        for tensor in (*modules[tie.key].parameters(), *modules[tie.key].buffers()):
            if not tensor.is_meta:
                _take_from_owner(tensor, tie.axis)


def _take_from_owner(tensor: Tensor, axis: AxisGroup) -> None:
    with torch.no_grad():
        values = tensor.detach().contiguous()
        comm.broadcast(values, src=axis.ranks[0], group=axis.group)
        tensor.copy_(values)


class TiedBuffers:
    """The persistent buffers of one tie's copies.

    Args:
        axis: the ranks that hold the copies.
        key: of the tie.
        module: this rank's copy.
    """

    def __init__(self, axis: AxisGroup, key: str, module: nn.Module) -> None:
        self._axis = axis
        self._key = key
        self._module = module
        held = module.state_dict(keep_vars=True)
        self._names = [name for name, _ in module.named_buffers() if name in held]
        self._seen = self._now()

    @classmethod
    def of(cls, ties: Sequence[TieGroup], modules: Mapping[str, nn.Module]) -> tuple[TiedBuffers, ...]:
        """Those of the ties that this rank has a part in, where there are any."""
        here = [(tie.axis, tie.key) for tie in ties if tie.axis is not None]
        found = (cls(axis, key, modules[key]) for axis, key in here)
        return tuple(each for each in found if each._names)

    def follow_owner(self) -> None:
        """Give every copy the owner's values where any has changed. Collective over the axis, and blocks.

        Raises:
            PipelineError: on all ranks of the axis, the copies have come to differ in shape or type.
        """
        now = self._now()
        has_changed = any(
            one is not other or one.is_inference() or before != after
            for (one, before), (other, after) in zip(self._seen, now, strict=True)
        )
        look = zlib.crc32(repr([(tuple(tensor.shape), tensor.dtype) for tensor, _ in now]).encode())
        told = torch.tensor([int(has_changed), look, -look], device=now[0][0].device)
        comm.all_reduce(told, op=comm.ReduceOp.MAX, group=self._axis.group)
        changed, largest, least = told.tolist()
        if largest != -least:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, (tensor, _) in zip(self._names, now, strict=True))
            raise PipelineError(
                f"buffers of the tied module {self._key!r} have come to differ in shape or dtype between its stages; here: "
                f"{shapes}. Buffers that hold no state of the model need register_buffer(..., persistent=False)."
            )
        if changed:
            for tensor, _ in now:
                _take_from_owner(tensor, self._axis)
        self._seen = self._now()

    def _now(self) -> list[tuple[Tensor, int]]:
        """Each buffer, and how often it has been changed in place."""
        held = [self._module.get_buffer(name) for name in self._names]
        return [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in held]


def require_no_hidden_ties(layers: Sequence[Layer], stage_of: Sequence[int]) -> None:
    """Refuse parameters that modules on different stages share: each stage would train a copy of its own.

    Raises:
        PipelineError: the text names both layers.
    """
    seen: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        for name, param in layer.named_parameters():
            first, first_name = seen.setdefault(id(param), (index, name))
            if stage_of[first] != stage_of[index]:
                raise PipelineError(
                    f"layer {first} ({first_name}) and layer {index} ({name}) share a parameter and lie on stages "
                    f"{stage_of[first]} and {stage_of[index]}. Describe both as TiedLayerSpec with one key."
                )
