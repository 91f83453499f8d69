"""What model states and buffers take on one rank: the engine's own layout, with bytes.

    module on meta --- engine.partition.planned_groups ---> flat groups ---> terms
                       optim.state_tensors             ---> bytes of optimizer state per element

    stage   weights      gradients                         masters, state         besides
    0       whole        whole                             whole
    1       whole        whole                             shard
    2       whole        shard + two buckets in flight     shard
    3       shard        shard + two buckets in flight     shard                  gathered units (`gathered`)

Called by `comparison`. Does not live here: activations (`tracing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.axes import ModelAxes, ZeroAxes
from deepspeed.engine.parameter_tier import PlannedGroup
from deepspeed.engine.partition import planned_groups
from deepspeed.engine.tiers import is_offloaded
from deepspeed.optim.build import build_optimizer
from deepspeed.optim.state_tensors import state_tensors
from deepspeed.planning.gathered import most_gathered_numel
from deepspeed.planning.terms import Term, Tier
from deepspeed.precision.policy import DtypePolicy
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import Kind
from deepspeed.zero.prefetch import GatherSettings

__all__ = ["ModelStates", "model_states"]

_BUCKETS_IN_FLIGHT = 2


@dataclass(frozen=True)
class ModelStates:
    """Terms of the model's states, and what traffic is counted from."""

    terms: tuple[Term, ...]
    weight_nbytes: int
    """Of all trained weights, whole."""
    gradient_nbytes: int
    """Of all gradients, whole, in the format in which they travel."""
    stays_gathered: bool
    """At stage 3: what forward gathered is there in backward."""


def model_states(module: nn.Module, config: DeepSpeedConfig, ranks: int) -> ModelStates:
    """Lay `module` out as an engine with `config` on `ranks` data-parallel ranks would.

    Args:
        module: on any device; its values are not read.
        config: of the engine.
        ranks: data-parallel ranks, those that share a sequence among them.
    """
    zero = config.zero_optimization
    everyone = AxisGroup(range(ranks), 0)
    one = AxisGroup((0,), 0)
    dense = ZeroAxes.of(everyone, zero.stage)
    spread = max((int(getattr(each, "ep_size", 1)) for each in module.modules()), default=1)
    experts = ZeroAxes.of(AxisGroup(range(0, ranks, spread), 0), zero.stage)
    axes = ModelAxes(dense, experts, everyone, has_replicas=False, tensor=one, parts=one)
    policy = DtypePolicy.from_config(config, "cpu")
    optimizer = _optimizer(module, config)
    groups, units = planned_groups(module, config, axes, policy, optimizer)
    terms = _Terms(config, policy, optimizer)
    for group in groups:
        terms.add(group)
    sharded = [sum(p.numel() for p in unit.params) for unit in units if unit.params]
    gathered, stays = most_gathered_numel(sharded, GatherSettings.from_config(zero))
    size = max((g.kind.param_dtype.itemsize for g in groups if g.kind.is_sharded), default=0)
    terms.gathered_nbytes = gathered * size
    return terms.result(module, stays_gathered=stays)


def _optimizer(module: nn.Module, config: DeepSpeedConfig) -> Optimizer | None:
    trained = [param for param in module.parameters() if param.requires_grad]
    if config.optimizer is None or not trained:
        return None
    return build_optimizer(config.optimizer, trained, on_host=is_offloaded(config))


class _Terms:
    """Adds up the flat groups of one engine."""

    def __init__(self, config: DeepSpeedConfig, policy: DtypePolicy, optimizer: Optimizer | None) -> None:
        self._zero = config.zero_optimization
        self._policy = policy
        self._optimizer = optimizer
        self._state_tier: Tier = self._tier(self._zero.offload_optimizer) if self._zero.stage >= 1 else "device"
        self._param_tier: Tier = self._tier(self._zero.offload_param) if self._zero.stage == 3 else "device"
        self._laid_out: set[int] = set()
        self._nbytes: dict[tuple[str, Tier], int] = {}
        self.weight_nbytes = self.gradient_nbytes = 0
        self.gathered_nbytes = 0

    @staticmethod
    def _tier(block: object) -> Tier:
        device = getattr(block, "device", "none")
        return {"cpu": "host", "nvme": "nvme"}.get(device, "device")  # type: ignore[return-value]

    def _count(self, name: str, tier: Tier, nbytes: int) -> None:
        self._nbytes[name, tier] = self._nbytes.get((name, tier), 0) + nbytes

    def add(self, group: PlannedGroup) -> None:
        """Count one flat group."""
        kind, layout = group.kind, group.layout
        self._laid_out |= {id(member.param) for member in group.members}
        if kind.is_sharded:
            self._count("weights", self._param_tier, layout.shard_numel * kind.param_dtype.itemsize)
        else:
            self._count("weights", "device", layout.numel * kind.param_dtype.itemsize)
        if not kind.is_trained:
            return
        dtype = self._policy.grad_accumulation_for(kind.param_dtype)
        self.weight_nbytes += layout.numel * kind.param_dtype.itemsize
        self.gradient_nbytes += layout.numel * self._travels_in(kind).itemsize
        self._add_gradients(group, dtype)
        if kind.master_dtype != kind.param_dtype:
            self._count("masters", self._state_tier, layout.shard_numel * kind.master_dtype.itemsize)
        self._count("optimizer state", self._state_tier, layout.shard_numel * self._state_nbytes(group))

    def _add_gradients(self, group: PlannedGroup, dtype: torch.dtype) -> None:
        layout = group.layout
        host: Tier = "device" if self._state_tier == "device" else "host"
        is_alone = group.axis.size == 1  # `engine.partition`: gradients are then views of one buffer on the device
        if not group.kind.is_sharded and (self._zero.stage < 2 or is_alone):
            self._count("gradients", "device", layout.numel * dtype.itemsize)
            if host != "device" and not is_alone:
                self._count("gradients", host, layout.shard_numel * dtype.itemsize)  # what the update reads
            return
        self._count("gradients", host, layout.shard_numel * dtype.itemsize)
        largest = max((bucket.stop - bucket.start for bucket in layout.buckets), default=0)
        places = min(_BUCKETS_IN_FLIGHT, len(layout.buckets))
        is_wide = self._travels_in(group.kind) == dtype == torch.promote_types(dtype, group.kind.param_dtype)
        in_flight = dtype if is_wide else group.kind.param_dtype  # as `engine.partition`
        self._count("buckets", "device", places * largest * in_flight.itemsize)

    def _travels_in(self, kind: Kind) -> torch.dtype:
        low = self._policy.autocast if kind.is_low_precision else None
        return low or self._policy.communication_for(kind.param_dtype)

    def _state_nbytes(self, group: PlannedGroup) -> int:
        assert self._optimizer is not None  # the group is trained
        options = self._optimizer.param_groups[group.kind.group_index]
        master = group.kind.master_dtype
        stepped = torch.promote_types(master, self._policy.state or master)
        dtypes = state_tensors(self._optimizer, options, stepped, state_dtype=self._policy.state)
        return sum(dtype.itemsize for dtype in dtypes.values())

    def result(self, module: nn.Module, *, stays_gathered: bool) -> ModelStates:
        """The terms, with what is in no flat group: frozen parameters that stay whole, and buffers."""
        others = [param for param in module.parameters() if id(param) not in self._laid_out]
        apart = sum(param.numel() * self._policy.param_for(param).itemsize for param in others)
        buffers = sum(b.numel() * b.element_size() for b in module.buffers())
        terms = [Term(name, nbytes, tier, lower=self._lower(name)) for (name, tier), nbytes in self._nbytes.items()]
        terms.append(Term("frozen weights", apart, lower='"stage": 3' if self._zero.stage < 3 else ""))
        terms.append(Term("module buffers", buffers))
        lower = "smaller stage3_max_live_parameters or stage3_max_reuse_distance, smaller stage3_prefetch_bucket_size"
        terms.append(Term("gathered weights", self.gathered_nbytes, moment="pass", lower=lower))
        kept = tuple(term for term in terms if term.nbytes)
        return ModelStates(kept, self.weight_nbytes, self.gradient_nbytes, stays_gathered)

    def _lower(self, name: str) -> str:
        stage = self._zero.stage
        offload = 'offload_optimizer {"device": "cpu"}'
        by_name: dict[str, Sequence[tuple[bool, str]]] = {
            "weights": [(stage < 3, '"stage": 3'), (self._param_tier == "device", 'offload_param {"device": "cpu"}')],
            "gradients": [(stage < 2, '"stage": 2'), (self._state_tier == "device", offload)],
            "masters": [(stage < 1, '"stage": 1'), (self._state_tier == "device", offload)],
            "optimizer state": [(stage < 1, '"stage": 1'), (self._state_tier == "device", offload)],
            "buckets": [(True, "a smaller reduce_bucket_size")],
        }
        return next((text for is_open, text in by_name.get(name, ()) if is_open), "")
