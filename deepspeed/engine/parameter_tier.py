"""Where sharded parameters rest between their uses: `offload_param` made concrete (ZeRO stage 3).

    device   this rank's shards                                    a gather
    none     on the device                                         from there
    cpu      host memory                                           its own shard is copied to the device first
    nvme     the first `max_in_cpu` elements as with "cpu",        its own shard is read first, into one of the buffers
             the others in a file, one folder per rank

On a CPU host memory is the device's, so "cpu" moves nothing there. Parameters that stay whole (below
`stage3_param_persistence_threshold`) rest on the device.

Lives here: the choice. Does not live here: the file (`offload.parameters`), what rests in it (`offload.parameter_plan`),
optimizer state (`engine.tiers`). Called by `engine.partition`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.comm.algorithms import FlatGatherer, LocalGatherer, flat_gatherer, local_stage, parameter_stage
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.zero import OffloadParamConfig
from deepspeed.errors import UnbuiltFeatureError
from deepspeed.offload import placement
from deepspeed.offload.agreement import together
from deepspeed.offload.parameter_plan import BucketShard, ParameterPlan, plan_parameters
from deepspeed.offload.parameters import ParameterFile, ParameterTier, TieredShards
from deepspeed.offload.swap_folder import SwapFolder
from deepspeed.ops.aio.engine import IoEngine, IoSettings, aligned_empty
from deepspeed.sharding import FlatLayout
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import Kind, NamedParameter

__all__ = ["PlannedGroup", "Resting", "RestingPlaces"]

_NOTHING_AWAY = ParameterPlan({}, 0, 0, 0)


@dataclass(frozen=True)
class PlannedGroup:
    """A flat group that is about to be made."""

    kind: Kind
    members: Sequence[NamedParameter]
    layout: FlatLayout
    axis: AxisGroup
    """The shard axis."""


@dataclass(frozen=True)
class Resting:
    """Where the values of one flat group rest."""

    gatherer: FlatGatherer
    """Of those in memory."""

    tier: TieredShards | None
    """Of the others."""

    is_apart: bool
    """What is in memory is not the device's."""


class RestingPlaces:
    """Where the values of all flat groups of one engine rest. Collective over `axis`.

    Args:
        config: of the engine.
        groups: in the order in which they are made.
        axis: the shard axis of what rests in files.
        device: of the engine.

    Raises:
        UnbuiltFeatureError: experts that other ranks hold others of would rest in files.
        ConfigError: on all ranks, buffers that are too small.
        FileIoError: on all ranks, a file of one of them cannot be made, or there is no space for it.
    """

    def __init__(
        self, config: DeepSpeedConfig, groups: Sequence[PlannedGroup], axis: AxisGroup, device: torch.device
    ) -> None:
        zero = config.zero_optimization
        block = zero.offload_param
        self._groups = groups
        self._axis = axis
        self._device = device
        self._block = block if zero.stage == 3 else None
        self._is_apart = self._block is not None and self._block.device != "none" and placement.is_host_apart(device)
        self._plan = self._planned()
        if self._plan.offsets:
            _refuse_experts(groups)
        self._tier = self._open(config) if self._plan.offsets else None

    def _planned(self) -> ParameterPlan:
        if self._block is None or self._block.device != "nvme":
            return _NOTHING_AWAY
        block = self._block
        return plan_parameters(
            list(self._shards()),
            max_in_cpu=block.max_in_cpu,
            buffer_size=block.buffer_size,
            buffer_count=block.buffer_count,
        )

    def _shards(self) -> Iterator[BucketShard]:
        for number, group in enumerate(self._groups):
            for position, bucket in enumerate(group.layout.buckets if group.kind.is_sharded else ()):
                start, stop = group.layout.shard_range(bucket)
                member = group.members[group.layout.slots[bucket.first_slot].index]
                size = group.kind.param_dtype.itemsize
                yield BucketShard(number, position, member.unit, stop - start, size, member.name)

    def _open(self, config: DeepSpeedConfig) -> ParameterTier:
        block, plan, axis = self._block, self._plan, self._axis
        assert isinstance(block, OffloadParamConfig)  # else nothing is away
        assert block.nvme_path is not None  # the block's own check
        with together(axis, self._device):
            folder = SwapFolder.claim(Path(block.nvme_path), f"parameters_rank{axis.rank}")
            file = ParameterFile(IoEngine(IoSettings.of(config.aio)), folder, plan.file_nbytes)
        is_pinned = block.pin_memory and self._is_apart

        def slot(nbytes: int) -> Tensor:
            return aligned_empty(nbytes, is_pinned=is_pinned)

        if axis.size == 1:
            return ParameterTier(plan, file, local_stage(plan.buffer_count, plan.buffer_nbytes, slot))
        apart = {"may_share_memory": not self._is_apart}
        stage = parameter_stage(plan.buffer_count, plan.buffer_nbytes, slot, self._device, axis.group, **apart)
        return ParameterTier(plan, file, stage)

    def of(self, number: int) -> Resting:
        """Where the values of group `number` rest. Collective; to be called once for each, in order."""
        group = self._groups[number]
        layout, dtype = group.layout, group.kind.param_dtype
        if not group.kind.is_sharded:
            return Resting(self._gatherer(group, layout.numel, is_apart=False), None, is_apart=False)
        numels = {n: (bucket.stop - bucket.start) // layout.world_size for n, bucket in enumerate(layout.buckets)}
        tier = None if self._tier is None else self._tier.shards(number, dtype, numels)
        here = sum(numel for n, numel in numels.items() if tier is None or n not in tier.buckets)
        return Resting(self._gatherer(group, here, is_apart=self._is_apart), tier, self._is_apart)

    def _gatherer(self, group: PlannedGroup, numel: int, *, is_apart: bool) -> FlatGatherer:
        at_rest, dtype = None, group.kind.param_dtype
        if is_apart:
            assert self._block is not None  # else nothing is apart
            memory = aligned_empty(numel * dtype.itemsize, is_pinned=self._block.pin_memory)
            at_rest = memory.view(dtype)
        if group.axis.size == 1:
            return LocalGatherer(numel, dtype, self._device, at_rest=at_rest)
        return flat_gatherer(numel, dtype, self._device, group.axis.group, at_rest=at_rest)


def _refuse_experts(groups: Sequence[PlannedGroup]) -> None:
    if any(group.kind.is_expert for group in groups):
        raise UnbuiltFeatureError(
            'zero_optimization.offload_param.device = "nvme" with experts that are spread over ranks (ep_size > 1) is not '
            'built yet: a file serves ranks that all share its parameters. Use device "cpu", or MoE(ep_size=1).'
        )
