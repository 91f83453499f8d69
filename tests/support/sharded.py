"""A model with sharded parameters and its coordinator, without an engine: what stage 3 does between two updates.

Gradients go where autograd puts them (`param.grad`, of this rank alone); `reduced` plays the reducer's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.algorithms import LocalGatherer, Work, flat_gatherer
from deepspeed.sharding import FlatLayout
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.coordinator import ParameterCoordinator, build_coordinator
from deepspeed.zero.flat import FlatGroup, Kind, NamedParameter
from deepspeed.zero.prefetch import GatherSettings
from deepspeed.zero.units import UnitPlan, plan_units

ALONE = AxisGroup((0,), 0)


class _Late:
    """A gather that arrives when it is waited for."""

    def __init__(self, gatherer: LateGatherer, start: int, stop: int, into: Tensor) -> None:
        self._gather = gatherer, start, stop, into

    def wait(self) -> None:
        gatherer, start, stop, into = self._gather
        into.copy_(gatherer.buffer[start:stop])
        gatherer.log.append(("arrived", start, stop))


@dataclass
class LateGatherer:
    """A single rank's gatherer that fills memory only in `wait`, as one between ranks does, and keeps a log."""

    buffer: Tensor
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def begin_update(self) -> None:
        self.log.append(("begin_update",))

    def publish(self) -> None:
        self.log.append(("publish",))

    def gather_in_place(self, start: int, stop: int) -> Work:
        raise AssertionError("sharded parameters are gathered into other memory")

    def gather(self, start: int, stop: int, into: Tensor) -> Work:
        self.log.append(("launched", start, stop))
        into.fill_(float("nan"))
        return _Late(self, start, stop, into)

    def view(self, start: int, stop: int) -> None:
        """As between ranks: there is nothing to see before a gather."""

    def close(self) -> None:
        self.log.append(("close",))


@dataclass
class Sharded:
    """A model whose parameters are sharded, and everything about it."""

    model: nn.Module
    plans: list[UnitPlan]
    flats: list[FlatGroup]
    coordinator: ParameterCoordinator

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward as an engine does."""
        loss.backward(**options)  # type: ignore[no-untyped-call]
        self.coordinator.backward_over()

    def step(self, rate: float = 0.1) -> None:
        """Subtract `rate` x this rank's gradient from the shards: plain SGD."""
        self.coordinator.before_update()
        for flat in self.flats:
            with flat.rewriting():
                for fragment in flat.own_fragments():
                    grad = flat.members[fragment.index].param.grad
                    if grad is not None:
                        part = grad.reshape(-1)[fragment.param_start : fragment.param_start + fragment.numel]
                        flat.values[fragment.buffer_start : fragment.buffer_start + fragment.numel].sub_(part, alpha=rate)
        for param in self.model.parameters():
            param.grad = None

    def whole(self) -> dict[str, Tensor]:
        """Name -> whole value, of every parameter."""
        params = list(self.model.parameters())
        sharded = [p for p in params if any(p is q for unit in self.coordinator.pool.units for q in unit.params)]
        self.coordinator.fetch(sharded)
        values = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.coordinator.drop(sharded)
        return values

    def states(self) -> str:
        """Which units are whole now: their names, "model" for what lies in the model itself."""
        whole = [unit for unit in self.coordinator.pool.units if unit.state.value == "gathered" and unit.pieces]
        return " ".join(unit.name or "model" for unit in whole)


def shard(
    model: nn.Module,
    settings: GatherSettings | None = None,
    *,
    axis: AxisGroup = ALONE,
    limit_numel: int = 10**9,
    granularity_threshold: int = 0,
    at_least: int = 0,
    is_late: bool = False,
    may_share_memory: bool = True,
) -> Sharded:
    """Shard the parameters of at least `at_least` elements over `axis`; build the coordinator. Collective over `axis`."""
    sharded = {p: p.numel() for p in model.parameters() if p.numel() >= at_least}
    plans = plan_units(model, sharded, limit_numel=limit_numel, granularity_threshold=granularity_threshold)
    unit_of = {id(param): plan.number for plan in plans for param in plan.params}
    by_kind: dict[Kind, list[NamedParameter]] = {}
    for order, (name, param) in enumerate(model.named_parameters()):
        if param in sharded:
            kind = Kind(0 if param.requires_grad else -1, param.dtype, param.dtype, is_sharded=True)
            member = NamedParameter(name, param, order, unit_of[id(param)], param.shape)
            by_kind.setdefault(kind, []).append(member)
    flats = [_flat(kind, members, axis, is_late, may_share_memory) for kind, members in by_kind.items()]
    return Sharded(model, plans, flats, build_coordinator(model, plans, flats, settings or GatherSettings()))


def _flat(kind: Kind, members: list[NamedParameter], axis: AxisGroup, is_late: bool, may_share_memory: bool) -> FlatGroup:
    layout = FlatLayout.plan(
        [member.param.numel() for member in members],
        bucket_numel=1,
        alignment=kind.alignment,
        world_size=axis.size,
        units=[member.unit for member in members],
    )
    device = members[0].param.device
    if is_late:
        gatherer: Any = LateGatherer(torch.zeros(layout.shard_numel, dtype=kind.param_dtype, device=device))
    elif axis.size == 1:
        gatherer = LocalGatherer(layout.shard_numel, kind.param_dtype, device)
    else:
        gatherer = flat_gatherer(layout.shard_numel, kind.param_dtype, device, axis.group, may_share_memory=may_share_memory)
    return FlatGroup(members, kind, layout, gatherer, axis)


def plain_step(model: nn.Module, rate: float = 0.1) -> None:
    """What `Sharded.step` does, for a model that is not sharded."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.sub_(param.grad, alpha=rate)
            param.grad = None


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name -> gradient, of the parameters that have one."""
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bit for bit, and the same names."""
    assert got.keys() == want.keys()
    unequal: Iterable[str] = [name for name in want if not torch.equal(got[name], want[name])]
    assert not list(unequal), f"differ: {list(unequal)}"
