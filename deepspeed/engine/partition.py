"""Which parameters are laid out together, which are sharded, and where gradients are kept: the ZeRO stage made concrete.

    stage   parameters   gradients   shard axis         (docs/adr/0008-sharded-stages.md has the whole table)
    0       whole        views       this rank alone
    1       whole        whole       data-parallel ranks
    2       whole        sharded     data-parallel ranks
    3       sharded, those above `param_persistence_threshold`; the others as at stage 2

Lives here: the choice. Does not live here: what a flat group or a gradient store does (`zero`), the optimizer
(`engine.build`, which calls this).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed import comm
from deepspeed.comm.algorithms import (
    FlatReduceScatterer,
    LocalReduceScatterer,
    flat_all_reducer,
    flat_reduce_scatterer,
)
from deepspeed.comm.reduced_whole import AllReduceScatterer
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.zero import ZeroConfig
from deepspeed.engine.axes import ModelAxes
from deepspeed.engine.experts import spread_experts
from deepspeed.engine.parameter_tier import PlannedGroup, Resting, RestingPlaces
from deepspeed.engine.stage import Stage
from deepspeed.engine.tensor_parts import TensorParts
from deepspeed.engine.tiers import OptimizerTier
from deepspeed.errors import ArgumentError
from deepspeed.precision.policy import DtypePolicy, low_precision_parameters
from deepspeed.sharding import FlatLayout, effective_bucket_numel
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup, Kind, NamedParameter, owner_of
from deepspeed.zero.gradient_store import GradientStore
from deepspeed.zero.gradients import ShardedGradients, ViewGradients, WholeGradients, largest_bucket_numel
from deepspeed.zero.holder import holder_of
from deepspeed.zero.host_gradients import HostScatterer, HostShards
from deepspeed.zero.masters import Masters
from deepspeed.zero.shard import is_sharded, take_whole, whole_shape
from deepspeed.zero.units import UnitPlan, plan_units

_BUCKETS_IN_FLIGHT = 2
_BROADCAST_NUMEL = 1 << 22  # elements that travel together when ranks start from the first rank's values


@dataclass(frozen=True)
class Partition:
    """The flat groups of one engine, and the axes they are laid out for."""

    trained: tuple[FlatGroup, ...]
    frozen: tuple[FlatGroup, ...]
    """Sharded parameters that no optimizer updates (stage 3)."""

    axes: ModelAxes
    """The ranks that each of them is laid out for."""

    units: tuple[UnitPlan, ...] = ()
    """How the module is cut for gathering; empty where nothing is sharded."""

    group_names: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters of each optimizer group, in the optimizer's own order."""

    @property
    def flats(self) -> tuple[FlatGroup, ...]:
        """All flat groups."""
        return self.trained + self.frozen

    @property
    def sharded(self) -> tuple[FlatGroup, ...]:
        """The flat groups whose parameters are sharded."""
        return tuple(flat for flat in self.flats if flat.is_sharded)


def plan_partition(
    module: nn.Module,
    config: DeepSpeedConfig,
    axes: ModelAxes,
    policy: DtypePolicy,
    optimizer: Optimizer | None,
    tier: OptimizerTier | None = None,
    stage: Stage | None = None,
) -> Partition:
    """Move the parameters of `module` into flat groups. Collective over the data-parallel ranks.

    Args:
        module: on its device; parameters that `zero.Init` has sharded are taken over.
        config: of the engine.
        axes: the ranks.
        policy: dtypes.
        optimizer: its groups say what is trained; None: nothing is.
        tier: where its masters rest; None: on the device.
        stage: the module's place in a pipeline; None: it is a whole model.

    Raises:
        ArgumentError: the optimizer holds a parameter that is not the module's.
    """
    planner = _Planner(module, config, policy, axes, (stage or Stage()).tie_of)
    groups = planner.groups(optimizer)
    device = next((group.members[0].param.device for group in groups), torch.device("cpu"))
    places = RestingPlaces(config, groups, axes.dense.shard, device)
    tier = tier or OptimizerTier()
    masters = [tier.masters(g.kind, g.layout.shard_numel) if g.kind.is_trained else None for g in groups]
    flats = [planner.build(group, places.of(number), masters[number]) for number, group in enumerate(groups)]
    laid_out = {id(member.param) for flat in flats for member in flat.members}
    for param in module.parameters():
        if id(param) not in laid_out and is_sharded(param):  # by `zero.Init`: too small to stay so, or below stage 3
            param.data = take_whole(param)
    return Partition(
        tuple(flat for flat in flats if flat.kind.is_trained),
        tuple(flat for flat in flats if not flat.kind.is_trained),
        axes,
        planner.units,
        planner.group_names(optimizer),
    )


def planned_groups(
    module: nn.Module, config: DeepSpeedConfig, axes: ModelAxes, policy: DtypePolicy, optimizer: Optimizer | None
) -> tuple[list[PlannedGroup], tuple[UnitPlan, ...]]:
    """The flat groups and units that `plan_partition` would make, without making them; moves nothing, asks no rank.

    Arguments are those of `plan_partition`; the module, a model or a stage of a pipeline, may lie on the meta device, and
    ranks need no process group.
    """
    planner = _Planner(module, config, policy, axes, Stage.of(module).tie_of)
    return planner.groups(optimizer), planner.units


class _Planner:
    def __init__(
        self,
        module: nn.Module,
        config: DeepSpeedConfig,
        policy: DtypePolicy,
        axes: ModelAxes,
        tie_of: Mapping[int, str],
    ) -> None:
        self.tie_of = tie_of
        self.zero = config.zero_optimization
        self.policy = policy
        self.axes = axes
        self.experts = spread_experts(module)
        self.parts = TensorParts.of(module, axes.tensor.rank, axes.tensor.size).ids
        autocast = config.torch_autocast
        safe = (autocast.lower_precision_safe_modules or ()) if autocast.enabled else ()
        self.low = low_precision_parameters(module, safe)
        self.row_sparse = _row_sparse(module, every=config.sparse_gradients) if self.zero.stage == 0 else set()
        shapes = {id(p): whole_shape(p) for p in module.parameters()}
        named = list(module.named_parameters())
        self.sharded = _sharded({id(p): shapes[id(p)].numel() for _, p in named}, self.zero)
        self.units = self._plan_units(module, shapes)
        units = {id(param): plan.number for plan in self.units for param in plan.params}
        members = [NamedParameter(name, p, i, units.get(id(p), 0), shapes[id(p)]) for i, (name, p) in enumerate(named)]
        self.names = {id(member.param): member for member in members}
        self.total_numel = sum(shape.numel() for shape in shapes.values())

    def _plan_units(self, module: nn.Module, shapes: Mapping[int, torch.Size]) -> tuple[UnitPlan, ...]:
        if not self.sharded:
            return ()
        plans = plan_units(
            module,
            {p: shapes[id(p)].numel() for p in module.parameters() if id(p) in self.sharded},
            limit_numel=min(self.zero.reduce_bucket_size, max(1, self.zero.max_live_parameters), self._most_read()),
            granularity_threshold=self.zero.module_granularity_threshold,
        )
        return tuple(plans)

    def _most_read(self) -> int:
        """Elements of a unit whose shards fit into the buffers that they are read through."""
        block = self.zero.offload_param
        is_read = block is not None and block.device == "nvme" and block.buffer_size > 0
        return (
            block.buffer_size * self.axes.dense.shard.size if block is not None and is_read else self.zero.reduce_bucket_size
        )

    def groups(self, optimizer: Optimizer | None) -> list[PlannedGroup]:
        """All flat groups, in the order in which they are made."""
        return [self.lay_out(kind, members) for kind, members in self.group_members(optimizer)]

    def group_members(self, optimizer: Optimizer | None) -> Iterator[tuple[Kind, list[NamedParameter]]]:
        """One entry per optimizer group, dtypes and treatment; then what is sharded although nothing trains it."""
        trained: set[int] = set()
        for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
            yield from self._by_kind(index, (p for p in group["params"] if p.requires_grad))
            trained.update(id(p) for p in group["params"] if p.requires_grad)
        others = [m.param for m in self.names.values() if id(m.param) not in trained and id(m.param) in self.sharded]
        yield from self._by_kind(-1, others)

    def group_names(self, optimizer: Optimizer | None) -> tuple[tuple[str, ...], ...]:
        """Names of the trained parameters of each group, in the optimizer's order."""
        groups = [group["params"] for group in optimizer.param_groups] if optimizer is not None else []
        return tuple(tuple(self.names[id(p)].name for p in params if p.requires_grad) for params in groups)

    def _by_kind(self, index: int, params: Iterable[nn.Parameter]) -> Iterator[tuple[Kind, list[NamedParameter]]]:
        by_kind: dict[Kind, list[NamedParameter]] = {}
        for param in params:
            member = self.names.get(id(param))
            if member is None:
                raise ArgumentError(
                    f"the optimizer's group {index} holds a parameter of shape {tuple(param.shape)} that is not in the "
                    "model. Build the optimizer from the parameters of the same model object, after destroy() of any "
                    "engine that had it."
                )
            kind = Kind(
                index,
                self.policy.param_for(param),
                self.policy.master_for(param) if index >= 0 else self.policy.param_for(param),
                is_sharded=id(param) in self.sharded,
                is_row_sparse=id(param) in self.row_sparse,
                is_low_precision=id(param) in self.low,
                tie=self.tie_of.get(id(param), ""),
                is_expert=id(param) in self.experts,
                is_part=id(param) in self.parts,
            )
            by_kind.setdefault(kind, []).append(member)
        for kind, members in by_kind.items():
            yield kind, sorted(members, key=lambda m: m.order)

    def lay_out(self, kind: Kind, members: list[NamedParameter]) -> PlannedGroup:
        """Plan where `members` lie."""
        zero = self.zero
        numels = [member.whole_shape.numel() for member in members if member.whole_shape is not None]
        at_most = (
            min(zero.reduce_bucket_size, zero.allgather_bucket_size) if zero.stage in (1, 2) else zero.reduce_bucket_size
        )
        # Copies of a tie are laid out alike whatever else their stages hold.
        total_numel = sum(numels) if kind.tie else self.total_numel
        axis = self.axes.of_kind(kind).shard
        layout = FlatLayout.plan(
            numels,
            bucket_numel=1 if kind.is_row_sparse else effective_bucket_numel([total_numel], at_most),
            alignment=kind.alignment,
            world_size=axis.size,
            units=[member.unit for member in members] if kind.is_sharded else None,
        )
        return PlannedGroup(kind, members, layout, axis)

    def build(self, group: PlannedGroup, resting: Resting, masters: Masters | None) -> FlatGroup:
        """Move the members in."""
        return FlatGroup(
            group.members,
            group.kind,
            group.layout,
            resting.gatherer,
            group.axis,
            whole_value=lambda member: take_whole(member.param),
            masters=masters,
            tier=resting.tier,
            device=group.members[0].param.device,
            is_apart=resting.is_apart,
        )


def _sharded(numels: Mapping[int, int], zero: ZeroConfig) -> set[int]:
    """Keys of what stage 3 shards: all but small parameters, as long as those together stay small."""
    if zero.stage < 3:
        return set()
    persistent_numel = 0
    sharded = set()
    for key, numel in numels.items():
        if numel <= zero.param_persistence_threshold and persistent_numel + numel <= zero.model_persistence_threshold:
            persistent_numel += numel
        else:
            sharded.add(key)
    return sharded


def _row_sparse(module: nn.Module, *, every: bool) -> set[int]:
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return {id(table.weight) for table in tables if every or table.sparse}


# -- gradients --------------------------------------------------------------------------------------------------------


def attach_gradient_stores(
    partition: Partition,
    config: DeepSpeedConfig,
    policy: DtypePolicy,
    tier: OptimizerTier | None = None,
) -> None:
    """Give each trained flat group the store of its stage. Collective over the data-parallel ranks."""
    for flat in partition.trained:
        data = partition.axes.of_kind(flat.kind).data
        flat.attach_gradients(_store(flat, config, policy, data, tier or OptimizerTier()))


def _store(
    flat: FlatGroup, config: DeepSpeedConfig, policy: DtypePolicy, data: AxisGroup, tier: OptimizerTier
) -> GradientStore:
    zero, kind = config.zero_optimization, flat.kind
    dtype = policy.grad_accumulation_for(kind.param_dtype)
    device = flat.device
    communication = policy.autocast if kind.is_low_precision else policy.communication_for(kind.param_dtype)

    options: dict[str, Any] = {
        "communication_dtype": communication,
        "prescale": config.prescale_gradients,
        "predivide_factor": config.gradient_predivide_factor,
    }
    if flat.axis.size == 1 and not flat.is_sharded:
        reducer = flat_all_reducer(flat.layout.numel, dtype, device, data.group, **options)
        in_place = dtype == kind.param_dtype  # autograd insists on a gradient of the parameter's own dtype
        return ViewGradients(flat, reducer) if in_place else WholeGradients(flat, reducer, is_scattered=False)

    def scatterer(numel: int, dtype: torch.dtype) -> FlatReduceScatterer:
        if flat.axis.size == 1:
            return LocalReduceScatterer(numel, dtype, device)
        if zero.reduce_scatter:
            return flat_reduce_scatterer(numel, dtype, device, flat.axis.group, **options)
        whole = flat_all_reducer(numel, dtype, device, flat.axis.group, **options)
        together = zero.use_multi_rank_bucket_allreduce
        return AllReduceScatterer(whole, flat.axis.rank, flat.axis.size, together=together)

    host = tier.gradient_memory(flat.layout.shard_numel, dtype)
    if zero.stage == 1:
        whole = WholeGradients(flat, scatterer(flat.layout.numel, dtype), is_scattered=True)
        return whole if host is None else HostShards(flat, whole, host)
    places = min(_BUCKETS_IN_FLIGHT, len(flat.layout.buckets))
    is_wide = communication == dtype == torch.promote_types(dtype, kind.param_dtype)
    in_flight = dtype if is_wide else kind.param_dtype  # a mean is rounded to what its bucket lies in
    to_shards = scatterer(places * largest_bucket_numel(flat), in_flight)
    if host is None:
        return ShardedGradients(flat, to_shards, dtype)
    return HostShards(flat, ShardedGradients(flat, HostScatterer(to_shards, device), dtype, memory=host), None)


# -- one start for all ranks ------------------------------------------------------------------------------------------


def copy_from_first_rank(module: nn.Module, axes: ModelAxes) -> None:
    """Give ranks that hold the same the values of the first: parameters and buffers that are whole and in nobody's hands.

    Call before parameters are laid out: masters then start from the same unrounded values everywhere.
    """
    params = [p for p in module.parameters() if owner_of(p) is None and holder_of(p) is None]
    of_experts = spread_experts(module)
    parts = TensorParts.of(module, axes.tensor.rank, axes.tensor.size).ids
    tensors = [*params, *module.buffers()]
    _copy([tensor.detach() for tensor in params if id(tensor) not in parts], axes.tensor)
    _copy([tensor.detach() for tensor in tensors if id(tensor) not in of_experts], axes.dense.data)
    _copy([tensor.detach() for tensor in tensors if id(tensor) in of_experts], axes.experts.data)


def _copy(tensors: Iterable[Tensor], axis: AxisGroup) -> None:
    if axis.size == 1:
        return
    batches: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            batches.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for alike in batches.values():
            for batch in _batches(alike):
                _broadcast_together(batch, axis)


def _batches(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    numel = 0
    for tensor in tensors:
        if batch and numel + tensor.numel() > _BROADCAST_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(tensor)
        numel += tensor.numel()
    yield batch


def _broadcast_together(batch: list[Tensor], axis: AxisGroup) -> None:
    if len(batch) == 1 and batch[0].is_contiguous():
        comm.broadcast(batch[0], src=axis.ranks[0], group=axis.group)
        return
    joined = torch.cat([tensor.reshape(-1) for tensor in batch])
    comm.broadcast(joined, src=axis.ranks[0], group=axis.group)
    for tensor, part in zip(batch, torch.split(joined, [tensor.numel() for tensor in batch]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def rewriting_all(partition: Partition) -> ExitStack:
    """Enter `FlatGroup.rewriting` of every flat group that no optimizer updates. All ranks enter it."""
    stack = ExitStack()
    for flat in partition.frozen:
        stack.enter_context(flat.rewriting())
    return stack
