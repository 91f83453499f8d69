"""What model states and buffers take on one rank: the engine's own layout, with bytes.

    module on meta --- engine.partition.planned_groups ---> flat groups ---> terms
                       optim.state_tensors             ---> bytes of optimizer state per element
                       a timeline of the module        ---> activations, gradients that wait, gathered units (`passes`)

    stage   weights      gradients                         masters, state         besides
    0       whole        whole                             whole
    1       whole        whole                             shard
    2       whole        shard + two buckets in flight     shard
    3       shard        shard + two buckets in flight     shard                  gathered units

Called by `of_module`. Does not live here: tiers (`tiers`), timelines (`tracing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.optimizer import OptimizerConfig
from deepspeed.engine.axes import ModelAxes, ZeroAxes
from deepspeed.engine.parameter_tier import PlannedGroup
from deepspeed.engine.partition import planned_groups
from deepspeed.engine.tiers import is_offloaded
from deepspeed.errors import ArgumentError
from deepspeed.offload.parameter_plan import ParameterPlan
from deepspeed.optim.build import build_optimizer
from deepspeed.optim.state_tensors import state_tensors
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.gathered import most_gathered_numel
from deepspeed.planning.passes import Busiest, PlannedBucket, PlannedUnit, busiest_moment
from deepspeed.planning.ranks import Ranks
from deepspeed.planning.terms import ModelStates, Moved, Term, Tier
from deepspeed.planning.tiers import Tiers
from deepspeed.planning.timeline import Timeline
from deepspeed.planning.update import scratch_nbytes
from deepspeed.precision.policy import DtypePolicy
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import Kind
from deepspeed.zero.prefetch import GatherSettings
from deepspeed.zero.units import UnitPlan

__all__ = ["Optimizers", "model_states"]

_ADAMW = OptimizerConfig(type="AdamW")
_BUCKETS_IN_FLIGHT = 2
_RECOMPUTE = "activation checkpointing, a smaller train_micro_batch_size_per_gpu"
_OFFLOAD_PARAM = 'offload_param {"device": "cpu"}'
_GATHER = "smaller stage3_max_live_parameters or stage3_max_reuse_distance, smaller stage3_prefetch_bucket_size"


class Optimizers:
    """The optimizer of a model, made once for the host and once for a device, and what it keeps.

    Args:
        module: whose parameters it trains.
    """

    def __init__(self, module: nn.Module) -> None:
        self._trained = [param for param in module.parameters() if param.requires_grad]
        self._made: dict[str, Optimizer] = {}
        self._kept: dict[tuple[str, int, torch.dtype, torch.dtype | None], tuple[int, ...]] = {}

    def of(self, config: DeepSpeedConfig) -> Optimizer | None:
        """As the engine would make it; AdamW where the configuration leaves it to the caller. None: nothing is trained."""
        if not self._trained:
            return None
        key = self._key(config)
        if key not in self._made:
            block = config.optimizer or _ADAMW
            self._made[key] = build_optimizer(block, self._trained, on_host=is_offloaded(config))
        return self._made[key]

    @staticmethod
    def _key(config: DeepSpeedConfig) -> str:
        return "host" if is_offloaded(config) else "device"

    def state_nbytes(self, config: DeepSpeedConfig, kind: Kind, state: torch.dtype | None) -> tuple[int, ...]:
        """Bytes per element of each tensor that it keeps for parameters of a kind."""
        stepped = torch.promote_types(kind.master_dtype, state or kind.master_dtype)
        key = (self._key(config), kind.group_index, stepped, state)
        if key not in self._kept:
            optimizer = self.of(config)
            assert optimizer is not None  # the kind is trained
            options = optimizer.param_groups[kind.group_index]
            dtypes = state_tensors(optimizer, options, stepped, state_dtype=state)
            self._kept[key] = tuple(dtype.itemsize for dtype in dtypes.values())
        return self._kept[key]


def model_states(
    module: nn.Module,
    config: DeepSpeedConfig,
    ranks: Ranks,
    optimizers: Optimizers,
    timeline: Timeline | None = None,
    *,
    device_type: str = "cuda",
) -> ModelStates:
    """Lay `module` out as an engine with `config` would on its first rank.

    Args:
        module: on any device; its values are not read.
        config: of the engine.
        ranks: how they are laid out.
        optimizers: of the same module.
        timeline: of one micro-batch; None: activations are left out.
        device_type: of the engine.
    """
    axes = _axes(ranks, module, config.zero_optimization.stage)
    policy = DtypePolicy.from_config(config, "cpu")
    optimizer = optimizers.of(config)
    groups, units = planned_groups(module, config, axes, policy, optimizer)
    most_stage = 1 if isinstance(module, PipelineModule) else 3
    laid_out = _LaidOut(config, policy, Tiers.of(config, device_type), groups, optimizers, axes, most_stage)
    laid_out.count()
    busiest = laid_out.busiest(module, units, timeline)
    terms = [*laid_out.terms(module), *_pass_terms(busiest)]
    scratch = scratch_nbytes(config, policy, groups, optimizer, torch.device(device_type))
    terms.append(Term("scratch of the update", scratch, moment="update", lower="a smaller sub_group_size"))
    kept = tuple(term for term in terms if term.nbytes)
    return ModelStates(kept, tuple(laid_out.moved), busiest.stays_gathered)


def _axes(ranks: Ranks, module: nn.Module, stage: int) -> ModelAxes:
    """As the engine has them on its first rank."""
    tensor = AxisGroup(range(ranks.tensor), 0)
    everyone = AxisGroup(range(0, ranks.world, ranks.tensor), 0)
    spread = max((int(getattr(each, "ep_size", 1)) for each in module.modules()), default=1)
    if ranks.zero % spread:
        raise ArgumentError(
            f"experts are spread over ep_size={spread} ranks, which does not divide {ranks.zero} data-parallel ranks. "
            "Change --world-size or ep_size."
        )
    experts = AxisGroup(range(0, ranks.world, ranks.tensor * spread), 0)
    dense, of_experts = ZeroAxes.of(everyone, stage), ZeroAxes.of(experts, stage)
    return ModelAxes(dense, of_experts, everyone, has_replicas=False, tensor=tensor, parts=tensor)


def _pass_terms(busiest: Busiest) -> Iterator[Term]:
    yield Term("activations", busiest.activation_nbytes, moment="pass", lower=_RECOMPUTE)
    yield Term("gradients on their way", busiest.waiting_nbytes, moment="pass", lower="a smaller reduce_bucket_size")
    yield Term("gathered weights", busiest.gathered_nbytes, moment="pass", lower=_GATHER)
    yield Term("gradients on their way to the host", busiest.staged_nbytes, moment="pass")


@dataclass
class _LaidOut:
    """The flat groups of one engine, with bytes."""

    config: DeepSpeedConfig
    policy: DtypePolicy
    places: Tiers
    groups: Sequence[PlannedGroup]
    optimizers: Optimizers
    axes: ModelAxes
    most_stage: int
    """Of ZeRO, that the module can be trained at."""

    moved: list[Moved] = field(default_factory=list)
    nbytes: dict[tuple[str, Tier], int] = field(default_factory=dict)
    others: list[Term] = field(default_factory=list)

    def count(self) -> None:
        """Add everything up that is there at all times."""
        away = self.places.away(self.groups)
        state_nbytes: dict[int, tuple[int, ...]] = {}
        for number, group in enumerate(self.groups):
            self._add_weights(number, group, away)
            if group.kind.is_trained:
                state_nbytes[number] = self.optimizers.state_nbytes(self.config, group.kind, self.policy.state)
                self._add_gradients(group)
                self._add_states(group, state_nbytes[number], has_masters=self.places.has_masters(group, away, number))
        self.others += self.places.weight_terms(away)
        self.others += self.places.state_terms(self.groups, state_nbytes, away)

    def _count(self, name: str, tier: Tier, nbytes: int) -> None:
        self.nbytes[name, tier] = self.nbytes.get((name, tier), 0) + nbytes

    def _add_weights(self, number: int, group: PlannedGroup, away: ParameterPlan) -> None:
        kind, layout = group.kind, group.layout
        size = kind.param_dtype.itemsize
        if not kind.is_sharded:
            self._count("weights", "device", layout.numel * size)
            return
        gone = (layout.shard_range(bucket) for at, bucket in enumerate(layout.buckets) if (number, at) in away.offsets)
        here = layout.shard_numel - sum(stop - start for start, stop in gone)
        self._count("weights", self.places.weight, here * size)

    def _add_states(self, group: PlannedGroup, state_nbytes: Sequence[int], *, has_masters: bool) -> None:
        kind, numel, tier = group.kind, group.layout.shard_numel, self.places.state
        whole = group.layout.numel
        nbytes = whole * kind.param_dtype.itemsize, whole * self._travels_in(kind).itemsize
        self.moved.append(Moved(*nbytes, self.axes.of_kind(kind).data.size))
        if has_masters:
            self._count("masters", tier, numel * kind.master_dtype.itemsize)
        self._count("optimizer state", tier, numel * sum(state_nbytes))

    def _add_gradients(self, group: PlannedGroup) -> None:
        layout, dtype, tier = group.layout, self._gradient_dtype(group), self.places.gradient
        is_alone = group.axis.size == 1  # `engine.partition`: gradients are then views of one buffer on the device
        if not group.kind.is_sharded and (self.config.zero_optimization.stage < 2 or is_alone):
            self._count("gradients", "device", layout.numel * dtype.itemsize)
            if tier != "device" and not is_alone:
                self._count("gradients", tier, layout.shard_numel * dtype.itemsize)  # what the update reads
            return
        self._count("gradients", tier, layout.shard_numel * dtype.itemsize)
        largest = max((bucket.stop - bucket.start for bucket in layout.buckets), default=0)
        places = min(_BUCKETS_IN_FLIGHT, len(layout.buckets))
        is_wide = self._travels_in(group.kind) == dtype == torch.promote_types(dtype, group.kind.param_dtype)
        in_flight = dtype if is_wide else group.kind.param_dtype  # as `engine.partition`
        self._count("buckets", "device", places * largest * in_flight.itemsize)

    def _gradient_dtype(self, group: PlannedGroup) -> torch.dtype:
        return self.policy.grad_accumulation_for(group.kind.param_dtype)

    def _travels_in(self, kind: Kind) -> torch.dtype:
        low = self.policy.autocast if kind.is_low_precision else None
        return low or self.policy.communication_for(kind.param_dtype)

    # -- the pass -----------------------------------------------------------------------------------------------------

    def busiest(self, module: nn.Module, units: Sequence[UnitPlan], timeline: Timeline | None) -> Busiest:
        """What is there besides at the busiest moment of forward and backward."""
        settings = GatherSettings.from_config(self.config.zero_optimization)
        planned = self._units(module, units)
        buckets = list(self._waiting())
        if timeline is None:
            numel, stays = most_gathered_numel([unit.numel for unit in planned if unit.numel], settings)
            size = max((unit.nbytes / unit.numel for unit in planned if unit.numel), default=0)
            waiting = max((sum(bucket.nbytes_of.values()) for bucket in buckets), default=0)
            staged = max((bucket.staged_nbytes for bucket in buckets), default=0)
            return Busiest(0, waiting, int(numel * size), _BUCKETS_IN_FLIGHT * staged, stays)
        zero = self.config.zero_optimization
        return busiest_moment(timeline, buckets, planned, settings, is_in_order=zero.stage >= 2)

    def _waiting(self) -> Iterator[PlannedBucket]:
        for group in self.groups:
            is_in_place = not group.kind.is_sharded and group.axis.size == 1
            is_in_place = is_in_place and self._gradient_dtype(group) == group.kind.param_dtype
            if not group.kind.is_trained or is_in_place or group.kind.is_row_sparse:
                continue
            size = group.kind.param_dtype.itemsize
            is_staged = self.places.gradient == "host" and self.config.zero_optimization.stage >= 2
            staged = self._gradient_dtype(group).itemsize if is_staged else 0  # `zero.host_gradients`
            for bucket in group.layout.buckets:
                start, stop = group.layout.shard_range(bucket)
                slots = group.layout.slots[bucket.first_slot : bucket.last_slot]
                members = [(group.members[slot.index], slot.numel) for slot in slots]
                unit = members[0][0].unit if group.kind.is_sharded else None
                nbytes_of = {member.name: numel * size for member, numel in members}
                yield PlannedBucket(nbytes_of, min(m.order for m, _ in members), unit, (stop - start) * staged)

    def _units(self, module: nn.Module, units: Sequence[UnitPlan]) -> list[PlannedUnit]:
        numels, nbytes, untrained = self._sizes(len(units))
        name_of = {each: name for name, each in module.named_modules()}
        owner = {param: unit.number for unit in units for param in unit.params}
        return [
            PlannedUnit(
                numels[unit.number],
                nbytes[unit.number],
                name_of[unit.modules[0]],
                name_of[unit.modules[-1]],
                tuple(dict.fromkeys(owner[param] for param in unit.borrowed)),
                unit.number not in untrained,
            )
            for unit in units
        ]

    def _sizes(self, count: int) -> tuple[list[int], list[int], set[int]]:
        """Elements of units, bytes that a gather of each takes, and which have something that is not trained."""
        numels, nbytes, untrained = [0] * count, [0] * count, set()
        for group in self.groups:
            for bucket in group.layout.buckets if group.kind.is_sharded else ():
                unit = group.members[group.layout.slots[bucket.first_slot].index].unit
                numel = bucket.stop - bucket.start
                numels[unit] += numel
                nbytes[unit] += 0 if self._lends(group) else numel * group.kind.param_dtype.itemsize
                if not group.kind.is_trained:
                    untrained.add(unit)
        return numels, nbytes, untrained

    def _lends(self, group: PlannedGroup) -> bool:
        """Whether whole parameters are views of what is there (`zero.states`, [Note: views of shards]); on a CPU alone."""
        block = self.config.zero_optimization.offload_param
        is_here = block is None or block.device == "none" or (block.device == "cpu" and not self.places.is_apart)
        return group.axis.size == 1 and self.places.is_cpu and is_here

    # -- the rest -----------------------------------------------------------------------------------------------------

    def terms(self, module: nn.Module) -> Iterator[Term]:
        """What is there at all times, with what is in no flat group: frozen parameters that stay whole, and buffers."""
        laid_out = {id(member.param) for group in self.groups for member in group.members}
        others = [param for param in module.parameters() if id(param) not in laid_out]
        apart = sum(param.numel() * self.policy.param_for(param).itemsize for param in others)
        yield from (Term(name, nbytes, tier, lower=self._lower(name)) for (name, tier), nbytes in self.nbytes.items())
        yield from self.others
        yield Term("frozen weights", apart, lower='"stage": 3' if self._is_below(3) else "")
        yield Term("module buffers", sum(b.numel() * b.element_size() for b in module.buffers()))

    def _lower(self, name: str) -> str:
        offload = 'offload_optimizer {"device": "cpu"}'
        is_on_device = self.places.state == "device"
        by_name: dict[str, Sequence[tuple[bool, str]]] = {
            "weights": [(self._is_below(3), '"stage": 3'), (self._may_move_weights, _OFFLOAD_PARAM)],
            "gradients": [(self._is_below(2), '"stage": 2'), (is_on_device, offload)],
            "masters": [(self._is_below(1), '"stage": 1'), (is_on_device, offload)],
            "optimizer state": [(self._is_below(1), '"stage": 1'), (is_on_device, offload)],
            "buckets": [(True, "a smaller reduce_bucket_size")],
        }
        return next((text for is_open, text in by_name.get(name, ()) if is_open), "")

    def _is_below(self, stage: int) -> bool:
        """Whether a ZeRO stage is higher than the configuration's and can be had."""
        return self.config.zero_optimization.stage < stage <= self.most_stage

    @property
    def _may_move_weights(self) -> bool:
        return self.places.weight == "device" and self.most_stage == 3
