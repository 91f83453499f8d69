"""The mesh: every kind of parallelism as one named axis, and the process group of each.

Lives here: `ParallelMesh`, built once and handed to whoever needs a group. Does not live here: the arithmetic (`grid`),
the process-wide current mesh (`groups`). `deepspeed.initialize` builds it; the engine asks `mesh.data_parallel`.

    pipe x replica x shard x expert x sequence x tensor         tensor varies fastest, pipe slowest

    data_parallel          replica x shard x expert              ranks that see different data
    expert_data_parallel   replica x shard                       of these, the ones that hold the same experts
    pipe_data              pipe x replica x shard x expert       ranks that together hold a model's gradients (ZeRO stage 1)
    pipe_expert            pipe x expert                         ranks that together hold one copy of a model's weights
    zero_group             replica x shard x expert x sequence   ranks that hold the same weights outside experts:
                           sequence ranks see other tokens of the same data, so gradients are averaged over them too
    expert_zero_group      replica x shard x sequence            of these, the ones that hold the same experts
    stage_ranks            all but pipe                          ranks that hold parts and copies of one stage's weights
    pipe_tensor            pipe x tensor                         ranks that together hold one copy of weights outside experts

[Note: which groups are made] An axis as large as the world uses the default group, axes over the same ranks share one
group, and an axis of size 1 has none until somebody asks for it: then a group of this rank alone is made, which takes no
other rank (`use_local_synchronization`). So plain data parallelism makes no group at all, and `AxisGroup.group` is always
a real group that torch and `deepspeed.comm` accept. A collective over one rank never leaves the process.

[Note: all ranks make all groups] `torch.distributed.new_group` must be called by every rank of the world for every group,
in the same order. `build` does so; it is a collective call. Groups are kept (`comm.kept_group`): the mesh of a later
engine makes none that an earlier one had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.patience import host_name
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.topology.grid import ProcessTopology, ranks_by_host

__all__ = ["AXES", "AxisGroup", "Hops", "ParallelMesh", "tensor_axis_of"]

AXES = ("pipe", "replica", "shard", "expert", "sequence", "tensor")

_EXPERT_DATA = ("replica", "shard")
_DATA = (*_EXPERT_DATA, "expert")
_PIPE_DATA = ("pipe", *_DATA)
_PIPE_EXPERT = ("pipe", "expert")
_ZERO = (*_DATA, "sequence")
_EXPERT_ZERO = (*_EXPERT_DATA, "sequence")
_STAGE = (*_ZERO, "tensor")
_PIPE_TENSOR = ("pipe", "tensor")
_OTHERS = (("pipe",), ("sequence",), ("tensor",))
_COMPOSITE = (_EXPERT_DATA, _DATA, _ZERO, _EXPERT_ZERO, _PIPE_DATA, _PIPE_EXPERT, _STAGE, _PIPE_TENSOR, AXES)
_KEPT: tuple[tuple[str, ...], ...] = (*((axis,) for axis in AXES), *_COMPOSITE)

_MPU_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("pipe",): ("pipeline_model_parallel", "pipe_parallel"),
    ("sequence",): ("sequence_parallel",),
    ("tensor",): ("tensor_model_parallel", "model_parallel"),
    _DATA: ("data_parallel",),
    _ZERO: ("sequence_data_parallel",),
}
"""What a model-parallel unit calls these groups: its accessors are `get_<name>_group` and `get_<name>_world_size`."""


_UNKNOWN = object()
_LEAST_FOR_HOPS = 4  # two hosts with two ranks each


class AxisGroup:
    """The ranks along one axis (or several together) that this rank belongs to.

    Attributes:
        ranks: their global ranks, in order.
        size: how many they are.
        rank: this process's position among them.
    """

    def __init__(self, ranks: Sequence[int], global_rank: int, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(global_rank)
        self._group = group
        self._hops: Hops | object | None = _UNKNOWN

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, never None (see [Note: which groups are made])."""
        if self._group is None:
            assert self.size == 1  # build gives every larger one its group
            self._group = comm.kept_group(self.ranks, is_local=True)
        return self._group

    def hops(self) -> Hops | None:
        """The two parts of the axis where it spans hosts; None where messages go straight.

        The first call is collective over the axis: ranks tell each other their hosts, and make the groups.
        """
        if self._hops is _UNKNOWN:
            self._hops = self._found_hops() if self.size >= _LEAST_FOR_HOPS else None
        return cast("Hops | None", self._hops)

    def _found_hops(self) -> Hops | None:
        hosts: list[str] = [""] * self.size
        comm.all_gather_object(hosts, host_name(), group=self.group)
        by_host = ranks_by_host(hosts)
        if by_host is None:
            return None
        mine = self.ranks[self.rank]
        inside = next([self.ranks[each] for each in host] for host in by_host if self.rank in host)
        across = [self.ranks[host[inside.index(mine)]] for host in by_host]
        groups = [comm.kept_group(ranks, is_local=True) for ranks in (inside, across)]
        positions = tuple(position for host in by_host for position in host)
        return Hops(AxisGroup(inside, mine, groups[0]), AxisGroup(across, mine, groups[1]), positions)

    def __deepcopy__(self, memo: object) -> AxisGroup:
        """This one: a copy of a module that holds it speaks to the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        """Not pickled: another process has other groups, and would hold another rank's experts under its own numbers."""
        raise UsageError(
            f"a module that knows its ranks (those of {self!r}) cannot be pickled. Save engine.save_checkpoint() or its "
            "state_dict(); or pickle the module before deepspeed.initialize and set_deepspeed_parallelism()."
        )

    def __repr__(self) -> str:
        return f"AxisGroup(ranks={list(self.ranks)}, rank={self.rank})"


class Hops(NamedTuple):
    """An axis that spans hosts, in two parts: messages go through one after the other.

    Attributes:
        inside: ranks of this host.
        across: ranks with this one's place among those of their host, host after host.
        positions: in the axis, host after host and place after place.
    """

    inside: AxisGroup
    across: AxisGroup
    positions: tuple[int, ...]


class ParallelMesh:
    """All ranks on named axes, as one rank sees them.

    Make one with `build` or `from_mpu`; both are collective calls.

    Attributes:
        sizes: `{axis: size}` for every name in `AXES`.
        rank: this process's global rank.
        world_size: number of ranks.
    """

    def __init__(self, grid: ProcessTopology, rank: int, adopted: Mapping[tuple[str, ...], AxisGroup]) -> None:
        self.sizes = {axis: grid.get_dim(axis) for axis in AXES}
        self.rank = rank
        self.world_size = grid.world_size()
        self._grid = grid
        made = {axis.ranks: axis.group for axis in adopted.values() if axis.size > 1}
        self._groups = {axes: adopted.get(axes) or _axis_group(grid, axes, rank, made) for axes in _KEPT}

    @classmethod
    def build(
        cls,
        world_size: int | None = None,
        rank: int | None = None,
        *,
        pipe: int = 1,
        shard: int = 1,
        expert: int = 1,
        sequence: int = 1,
        tensor: int = 1,
    ) -> ParallelMesh:
        """Lay all ranks out; the replica axis takes what the given sizes leave. Every rank of the world must call it.

        Args:
            world_size: number of ranks of the process group; None asks it.
            rank: this process's rank in it; None asks it.
            pipe: pipeline stages.
            shard: ranks that ZeRO spreads states over.
            expert: ranks that experts are spread over; they see different data.
            sequence: ranks that share one sequence.
            tensor: ranks that share each matrix.

        Raises:
            ArgumentError: a size is below 1, or the sizes do not divide the number of ranks.
            CommError: there is no process group.
        """
        actual = comm.get_world_size(), comm.get_rank()
        asked = (actual[0] if world_size is None else world_size, actual[1] if rank is None else rank)
        if asked != actual:
            raise ArgumentError(
                f"the mesh was asked for world_size={asked[0]}, rank={asked[1]}, but the process group has "
                f"world_size={actual[0]}, rank={actual[1]}. Leave both out to use these."
            )
        grid = ProcessTopology(AXES, _sizes(actual[0], pipe, shard, expert, sequence, tensor))
        return cls(grid, actual[1], adopted={})

    @classmethod
    def from_mpu(cls, mpu: Any) -> ParallelMesh:
        """Take over the groups of a model-parallel-unit object, as Megatron and Ulysses hand in.

        Every rank must call it. Of the documented accessors `get_data_parallel_*`, `get_sequence_parallel_*`,
        `get_sequence_data_parallel_*`, `get_tensor_model_parallel_*` or `get_model_parallel_*`,
        `get_pipeline_model_parallel_*` or `get_pipe_parallel_*` (each `group`, `world_size`), any may be missing. Data
        ranks become the replica axis. What the object does not hand in is made by the layout of `build`.

        Raises:
            UsageError: the sizes do not multiply to the number of ranks, or the layout of `build` would put other ranks
                into a group than the object does.
        """
        world_size, rank = comm.get_world_size(), comm.get_rank()
        grid = ProcessTopology(AXES, _sizes_of_mpu(mpu, world_size))
        given = {axes: _group_of_mpu(mpu, names) for axes, names in _MPU_NAMES.items()}
        handed = {
            axes: AxisGroup(dist.get_process_group_ranks(group), rank, group)
            for axes, group in given.items()
            if group is not None
        }
        adopted = _same_ranks(handed, grid)
        wanted = {axes: tuple(grid.group_of(rank, axes)) for axes in _KEPT}
        if any(len(ranks) not in (1, world_size) and axes not in adopted for axes, ranks in wanted.items()):
            _require_our_layout(wanted, adopted)
        return cls(grid, rank, adopted)

    def with_experts(self, expert: int, *, is_slowest: bool = False) -> ParallelMesh:
        """The same ranks and groups, with the data axis split: `expert` ranks along it hold different experts.

        Every rank of the world must call it, on a mesh whose expert axis has size 1.

            8 data ranks, expert=4    default       experts over 0-3 and 4-7, the same experts on 0 4, 1 5, 2 6, 3 7
                                      is_slowest    experts over 0 2 4 6 and 1 3 5 7, the same on 0 1, 2 3, 4 5, 6 7

        Args:
            expert: how many; they see different data.
            is_slowest: ranks that hold the same experts are neighbours, not those that hold different ones
                (`use_data_before_expert_parallelism`).

        Raises:
            ArgumentError: they do not divide the data-parallel ranks.
            UsageError: on all ranks, the groups were handed in by an mpu that numbers ranks otherwise.
        """
        data = self.data_parallel
        assert self.sizes["expert"] == 1  # the callers' meshes are new
        if expert < 1 or self.sizes["replica"] % expert:
            raise ArgumentError(
                f"experts over {expert} ranks (ep_size) do not divide the {data.size} data-parallel ranks. Use an ep_size "
                f"that divides {data.size}, or start other ranks (`deepspeed --num_gpus {expert} train.py`)."
            )
        same = (*_OTHERS, _DATA, _ZERO, _PIPE_DATA, _STAGE, _PIPE_TENSOR)
        kept: dict[tuple[str, ...], AxisGroup] = {axes: self._groups[axes] for axes in same}
        sizes = {**self.sizes, "replica": self.sizes["replica"] // expert, "expert": expert}
        order = ("pipe", "expert", "replica", "shard", "sequence", "tensor") if is_slowest else AXES
        grid = ProcessTopology(order, [sizes[axis] for axis in order])
        _require_our_layout({axes: tuple(grid.group_of(self.rank, axes)) for axes in _KEPT}, kept)
        return ParallelMesh(grid, self.rank, kept)

    @property
    def world(self) -> AxisGroup:
        """All ranks."""
        return self._groups[AXES]

    def axis(self, name: str) -> AxisGroup:
        """Return the ranks along one axis.

        Raises:
            ArgumentError: there is no such axis; the text lists them.
        """
        if name not in AXES:
            raise ArgumentError(f"the mesh has no axis {name!r}; its axes are {', '.join(AXES)}.")
        return self._groups[(name,)]

    def group_along(self, name: str, use: str) -> dist.ProcessGroup:
        """Another group over the ranks along an axis, for traffic that must not queue behind that of `axis(name).group`.

        Collective over the world: [Note: all ranks make all groups].
        """
        groups = {tuple(ranks): comm.kept_group(ranks, use) for ranks in self._grid.groups_along((name,))}
        return groups[self.axis(name).ranks]

    @property
    def data_parallel(self) -> AxisGroup:
        """The ranks that see different data and hold the same weights."""
        return self._groups[_DATA]

    @property
    def expert_data_parallel(self) -> AxisGroup:
        """The ranks that hold the same experts and see different data."""
        return self._groups[_EXPERT_DATA]

    @property
    def pipe_data(self) -> AxisGroup:
        """The data-parallel ranks of all stages: those that hold other parts of one model, or see other data."""
        return self._groups[_PIPE_DATA]

    @property
    def pipe_expert(self) -> AxisGroup:
        """The stages and expert-parallel ranks that together hold one copy of the model's weights."""
        return self._groups[_PIPE_EXPERT]

    @property
    def zero_group(self) -> AxisGroup:
        """The ranks that gradients are averaged over and ZeRO may spread states over: data-parallel x sequence."""
        return self._groups[_ZERO]

    @property
    def expert_zero_group(self) -> AxisGroup:
        """The same for experts: the ranks that hold the same ones and see other tokens."""
        return self._groups[_EXPERT_ZERO]

    @property
    def stage_ranks(self) -> AxisGroup:
        """All ranks of this pipeline stage."""
        return self._groups[_STAGE]

    @property
    def pipe_tensor(self) -> AxisGroup:
        """The stages and tensor-parallel ranks that together hold one copy of the weights outside experts."""
        return self._groups[_PIPE_TENSOR]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"ParallelMesh(rank {self.rank} of {self.world_size}: {sizes})"


def _same_ranks(handed: Mapping[tuple[str, ...], AxisGroup], grid: ProcessTopology) -> dict[tuple[str, ...], AxisGroup]:
    """Groups for all axes that differ from handed ones in axes of size 1 alone."""

    def spread(axes: tuple[str, ...]) -> frozenset[str]:
        return frozenset(axis for axis in axes if grid.get_dim(axis) > 1)

    by_axes = {spread(axes): group for axes, group in handed.items()}
    return {axes: by_axes[spread(axes)] for axes in _KEPT if spread(axes) in by_axes}


def tensor_axis_of(mpu: Any) -> AxisGroup:
    """The tensor-parallel ranks that a model-parallel-unit object tells of; this rank alone where it tells of none.

    Not collective. Of `get_tensor_model_parallel_*` or `get_model_parallel_*` it asks `world_size`, and `group` where
    that is not 1.

    Raises:
        UsageError: it has several such ranks, and no group of them.
    """
    names = _MPU_NAMES[("tensor",)]
    size = _size_of_mpu(mpu, names)
    if size is None or size == 1:
        return AxisGroup((0,), 0)
    group = _group_of_mpu(mpu, names)
    if group is None:
        raise UsageError(
            f"the mpu has {size} tensor-parallel ranks, and no group of them. Let it hand in "
            "get_tensor_model_parallel_group() or get_model_parallel_group()."
        )
    return AxisGroup(dist.get_process_group_ranks(group), dist.get_rank(), group)


def _sizes(world_size: int, pipe: int, shard: int, expert: int, sequence: int, tensor: int) -> tuple[int, ...]:
    """Return the sizes in the order of `AXES`; the replica axis takes what the others leave."""
    given = {"pipe": pipe, "shard": shard, "expert": expert, "sequence": sequence, "tensor": tensor}
    too_small = {axis: size for axis, size in given.items() if size < 1}
    if too_small:
        raise ArgumentError(f"mesh sizes {too_small}: every axis needs at least 1 rank.")
    taken = math.prod(given.values())
    if world_size % taken:
        text = " x ".join(f"{axis}={size}" for axis, size in given.items() if size > 1)
        raise ArgumentError(
            f"{text} = {taken} ranks do not divide the world of {world_size} ranks. "
            f"Start a multiple of {taken} ranks (`deepspeed --num_gpus {taken} train.py`), or change one of the sizes."
        )
    return pipe, world_size // taken, shard, expert, sequence, tensor


def _axis_group(
    grid: ProcessTopology,
    axes: tuple[str, ...],
    rank: int,
    made: dict[tuple[int, ...], dist.ProcessGroup],
) -> AxisGroup:
    """Return this rank's group along `axes`, made if no axis before had the same ranks; `made` remembers."""
    mine = tuple(grid.group_of(rank, axes))
    if len(mine) == grid.world_size():
        return AxisGroup(mine, rank, comm.get_world_group())
    if len(mine) > 1 and mine not in made:
        for ranks in grid.groups_along(axes):  # see [Note: all ranks make all groups]
            made[tuple(ranks)] = comm.kept_group(ranks)
    return AxisGroup(mine, rank, made.get(mine))


def _sizes_of_mpu(mpu: Any, world_size: int) -> tuple[int, ...]:
    pipe, sequence, tensor = (_size_of_mpu(mpu, _MPU_NAMES[(axis,)]) or 1 for axis in ("pipe", "sequence", "tensor"))
    data = _size_of_mpu(mpu, _MPU_NAMES[_DATA])
    taken = pipe * sequence * tensor
    if world_size % taken or data not in (None, world_size // taken):
        raise UsageError(
            f"the mpu has pipe={pipe}, sequence={sequence}, tensor={tensor} and {data or 'no'} data-parallel ranks; "
            f"over {world_size} ranks there should be {world_size}/{taken} data-parallel ones. "
            "Give it sizes whose product is the number of ranks."
        )
    return pipe, world_size // taken, 1, 1, sequence, tensor


def _size_of_mpu(mpu: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        get_size = getattr(mpu, f"get_{name}_world_size", None)
        if get_size is not None:
            return int(get_size())
    group = _group_of_mpu(mpu, names)
    return None if group is None else dist.get_world_size(group)


def _group_of_mpu(mpu: Any, names: tuple[str, ...]) -> dist.ProcessGroup | None:
    for name in names:
        get_group = getattr(mpu, f"get_{name}_group", None)
        if get_group is not None:
            group: dist.ProcessGroup | None = get_group()
            return group
    return None


def _require_our_layout(wanted: dict[tuple[str, ...], tuple[int, ...]], adopted: dict[tuple[str, ...], AxisGroup]) -> None:
    """Refuse, on all ranks together, an mpu whose groups `build` would lay out otherwise: missing ones could not be made."""
    differing = {axes: group for axes, group in adopted.items() if group.ranks != wanted[axes]}
    disagree = torch.tensor(float(bool(differing)), device=get_accelerator().current_device_name())
    comm.all_reduce(disagree, comm.ReduceOp.MAX)
    if disagree.item():
        here = {" x ".join(axes): list(group.ranks) for axes, group in differing.items()} or "this rank's groups agree"
        raise UsageError(
            f"the mpu lacks groups that would have to be made, and its own lie differently from the order "
            f"{' x '.join(AXES)} with neighbours in rank along the last: {here} on this rank. "
            "Let the mpu also hand in get_data_parallel_group and get_sequence_data_parallel_group, or number its ranks so."
        )
