"""Flat groups for tests of the parts that stand on them: one rank alone, or one of several that a test drives in turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.algorithms import FlatGatherer, LocalGatherer
from deepspeed.sharding import FlatLayout
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup, Kind, NamedParameter
from tests.support.fake_reducers import Lockstep, pretend_axis

CPU = torch.device("cpu")


def flat_group(
    named: nn.Module | Iterable[tuple[str, nn.Parameter]],
    *,
    dtype: torch.dtype = torch.float32,
    master: torch.dtype = torch.float32,
    bucket_numel: int = 30,
    axis: AxisGroup | None = None,
    gatherer: FlatGatherer | None = None,
    **kind: Any,
) -> FlatGroup:
    """A flat group of all parameters, trained, without gradients; `kind` are further fields of `Kind`."""
    pairs = named.named_parameters() if isinstance(named, nn.Module) else named
    members = [NamedParameter(name, param, order) for order, (name, param) in enumerate(pairs)]
    axis = axis or pretend_axis(1)
    of = Kind(kind.pop("group_index", 0), dtype, master, **kind)
    layout = FlatLayout.plan(
        [m.param.numel() for m in members], bucket_numel=bucket_numel, alignment=of.alignment, world_size=axis.size
    )
    return FlatGroup(members, of, layout, gatherer or LocalGatherer(layout.numel, dtype, CPU), axis)


def lockstep_groups(modules: list[nn.Module], **options: Any) -> list[FlatGroup]:
    """One flat group per rank over `modules`, twins of each other, whose parameters are whole."""
    world_size = len(modules)
    numels = [p.numel() for p in modules[0].parameters()]
    dtype, master = options.get("dtype", torch.float32), options.get("master", torch.float32)
    alignment = Kind(0, dtype, master).alignment
    layout = FlatLayout.plan(
        numels, bucket_numel=options.get("bucket_numel", 30), alignment=alignment, world_size=world_size
    )
    ranks = Lockstep(world_size, layout.numel, dtype)
    return [
        flat_group(module, axis=pretend_axis(world_size, rank), gatherer=ranks.gatherer(rank), **options)
        for rank, module in enumerate(modules)
    ]
