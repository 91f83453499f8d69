"""Where masters, optimizer state and gradients rest: `offload_optimizer` made concrete.

    device   masters and state                          gradients            walk
    none     beside the model's values                  beside them          zero.residence.InMemory
    cpu      host memory                                host memory          zero.residence.OnHost
    nvme     files in nvme_path, one folder per rank    host memory          zero.disk_residence.DiskResidence

On a CPU host memory is the device's, so "cpu" moves nothing there, and masters of full-precision models stay the model's own
values. On an accelerator the model's values are delivered from the host after each sub-group.

Lives here: the choice. Does not live here: the tiers themselves (`offload`), parameters' own tier. Called by `engine.build`
and, for masters, by `engine.partition`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.zero import OffloadOptimizerConfig
from deepspeed.errors import ArgumentError
from deepspeed.offload import placement
from deepspeed.offload.agreement import together
from deepspeed.offload.sub_groups import check_buffers, plan_sub_groups
from deepspeed.offload.swap_folder import SwapFolder
from deepspeed.offload.tier_file import TierFile
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio.engine import IoEngine, IoSettings, aligned_empty
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.optim.state_tensors import state_tensors
from deepspeed.precision.policy import DtypePolicy
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.disk_residence import DiskResidence, DiskSettings, StateDtypes
from deepspeed.zero.flat import FlatGroup, Kind
from deepspeed.zero.masters import FileMasters, Masters, MemoryMasters
from deepspeed.zero.residence import InMemory, OnHost, Residence

__all__ = ["OptimizerTier", "check_offloaded", "is_offloaded", "optimizer_tier"]

_HOST_CLASSES = (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)


def is_offloaded(config: DeepSpeedConfig) -> bool:
    """Whether optimizer state is to rest somewhere else than on the device."""
    return config.zero_optimization.offloads_optimizer


def check_offloaded(optimizer: Optimizer, config: DeepSpeedConfig, *, is_clients: bool, may_cut: bool) -> None:
    """Refuse an optimizer that cannot train, or not well, where `offload_optimizer` puts its state. All ranks alike.

    Raises:
        ArgumentError: the text has the reason and what to use instead.
        ConfigError: too few buffers for what the optimizer keeps.
    """
    if not is_offloaded(config):
        return
    block = config.zero_optimization.offload_optimizer
    assert block is not None  # is_offloaded
    name, is_host_class = type(optimizer).__name__, isinstance(optimizer, _HOST_CLASSES)
    if is_clients and config.zero_force_ds_cpu_optimizer and not is_host_class:
        raise ArgumentError(
            f'optimizer {name} with offload_optimizer.device "{block.device}": state in host memory is stepped there, and '
            "zero_force_ds_cpu_optimizer asks for an optimizer made for that. Use deepspeed.ops.adam.DeepSpeedCPUAdam (or "
            'DeepSpeedCPUAdagrad, DeepSpeedCPULion), or set "zero_force_ds_cpu_optimizer": false to train with this one.'
        )
    if block.ratio < 1.0 and not isinstance(optimizer, DeepSpeedCPUAdam):
        raise ArgumentError(
            f"optimizer {name} with offload_optimizer.ratio = {block.ratio:g}: both parts are stepped by DeepSpeedCPUAdam's "
            'rule. Use Adam or AdamW of the config (without "torch_adam") or DeepSpeedCPUAdam, or leave ratio out.'
        )
    if block.device == "nvme" and not may_cut:
        raise ArgumentError(
            f'optimizer {name} with offload_optimizer.device "nvme": it looks at whole parameters, but only ranges of them '
            'are in memory at once. Use device "cpu", or an element-wise optimizer such as AdamW.'
        )
    if block.device == "nvme":
        kept = [state_tensors(optimizer, group, torch.float32) for group in optimizer.param_groups]
        check_buffers(block.buffer_count, 1 + max(map(len, kept), default=0))


class OptimizerTier:
    """The form without a tier of its own, which is also the host's where host and device are one place."""

    def masters(self, kind: Kind, numel: int) -> Masters | None:
        """Where the masters of a trained flat group with `numel` elements in shard space rest; None: it decides itself.

        Collective over the shard axis where there are files.
        """
        return None

    def residence(self, flats: Iterable[FlatGroup], optimizer: Optimizer, policy: DtypePolicy) -> Residence:
        """The walk's side of it. Collective likewise."""
        return InMemory()

    def gradient_memory(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Memory for this rank's gradients; None: on the device."""
        return None


class HostTier(OptimizerTier):
    """Host memory beside an accelerator's.

    Args:
        is_pinned: lock it for the accelerator.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned

    def masters(self, kind: Kind, numel: int) -> Masters:
        """See `OptimizerTier`."""
        memory = aligned_empty(numel * kind.master_dtype.itemsize, is_pinned=self._is_pinned)
        return MemoryMasters(memory.view(kind.master_dtype), is_apart=True)

    def residence(self, flats: Iterable[FlatGroup], optimizer: Optimizer, policy: DtypePolicy) -> Residence:
        """See `OptimizerTier`."""
        return OnHost(is_pinned=self._is_pinned)

    def gradient_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `OptimizerTier`."""
        return aligned_empty(numel * dtype.itemsize, is_pinned=self._is_pinned).view(dtype)


class DiskTier(OptimizerTier):
    """Files on a fast disk.

    Args:
        config: of the engine.
        axis: the shard axis.
        device: of the engine.
    """

    def __init__(self, config: DeepSpeedConfig, axis: AxisGroup, device: torch.device) -> None:
        block = config.zero_optimization.offload_optimizer
        assert block is not None  # optimizer_tier
        assert block.nvme_path is not None  # the block's own check
        self._block: OffloadOptimizerConfig = block
        self._sub_group_size = config.zero_optimization.sub_group_size
        self._axis = axis
        self._device = device
        self._is_host_apart = placement.is_host_apart(device)
        self._io = IoEngine(IoSettings.of(config.aio))
        with together(axis, device):
            self._folder = SwapFolder.claim(Path(block.nvme_path), f"optimizer_rank{axis.rank}")
        self._files = 0

    def masters(self, kind: Kind, numel: int) -> Masters:
        """See `OptimizerTier`."""
        with together(self._axis, self._device):
            path = self._folder.path / f"masters{self._files}"
            file = TierFile(self._io, path, numel * kind.master_dtype.itemsize)
        self._files += 1
        return FileMasters(file, kind.master_dtype, is_apart=self._is_host_apart)

    def residence(self, flats: Iterable[FlatGroup], optimizer: Optimizer, policy: DtypePolicy) -> Residence:
        """See `OptimizerTier`."""
        flats = list(flats)
        state_dtypes = _state_dtypes(flats, optimizer, policy)
        block = self._block
        sub_groups = plan_sub_groups(
            max(1, sum(flat.layout.shard_numel for flat in flats)),
            1 + max((len(keys) for keys in state_dtypes.values()), default=0),
            sub_group_size=self._sub_group_size,
            buffer_count=block.buffer_count,
            reads_ahead=block.pipeline_read,
            writes_behind=block.pipeline_write,
        )
        settings = DiskSettings(sub_groups, block.pipeline_read, block.pipeline_write, block.pin_memory)
        return DiskResidence(self._io, self._folder, self._axis, self._device, settings, state_dtypes)

    def gradient_memory(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """See `OptimizerTier`."""
        if not self._is_host_apart:
            return None
        return aligned_empty(numel * dtype.itemsize, is_pinned=self._block.pin_memory).view(dtype)


def optimizer_tier(
    config: DeepSpeedConfig, axis: AxisGroup, device: torch.device, optimizer: Optimizer | None
) -> OptimizerTier:
    """The tier that the config asks for. Collective over `axis`, the shard axis."""
    block = config.zero_optimization.offload_optimizer
    if optimizer is None or block is None or not is_offloaded(config):
        return OptimizerTier()
    if block.device == "nvme":
        return DiskTier(config, axis, device)
    return HostTier(is_pinned=block.pin_memory) if placement.is_host_apart(device) else OptimizerTier()


def _state_dtypes(flats: Iterable[FlatGroup], optimizer: Optimizer, policy: DtypePolicy) -> StateDtypes:
    """What the optimizer keeps, for slices in the masters' dtype and in the one that they may be widened to."""
    found = {}
    for flat in flats:
        index, dtype = flat.kind.group_index, flat.kind.master_dtype
        for stepped in {dtype, torch.promote_types(dtype, policy.state or dtype)}:
            group = optimizer.param_groups[index]
            found[index, stepped] = state_tensors(optimizer, group, stepped, state_dtype=policy.state)
    return found
