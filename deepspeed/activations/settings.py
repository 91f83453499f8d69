"""What `configure` and configurations have said, and the parts that follow from it.

    engine's config block -------+                              (only where nobody called `configure`)
    configure(deepspeed_config) -+--> Settings --build--> Keeper, Boundary --> Checkpointer
    configure(arguments) --------+                              (at the first checkpoint after a change)

Lives here: `Settings` and the choice of the place where inputs rest. Does not live here: the process's own settings and
the published functions (`checkpointing`, the caller).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Self

from deepspeed.activations.boundary import NoBoundary, Watched
from deepspeed.activations.buffers import Buffers, FreshBuffers, MakeBytes, ReusedBuffers, device_bytes
from deepspeed.activations.disk import DiskPlace
from deepspeed.activations.host import HostPlace
from deepspeed.activations.keeping import Keeper
from deepspeed.activations.lane import Lane
from deepspeed.activations.partition import TensorShards
from deepspeed.activations.places import DevicePlace, Place
from deepspeed.activations.random_states import tracker
from deepspeed.activations.segment import Checkpointer
from deepspeed.config.base import faults_of, parse
from deepspeed.config.faults import raise_faults
from deepspeed.config.memory import ActivationCheckpointingConfig, AioConfig
from deepspeed.errors import ArgumentError, ConfigError
from deepspeed.ops.aio.engine import IoEngine, IoSettings, aligned_empty
from deepspeed.topology.mesh import AxisGroup

__all__ = ["Settings"]


def _alone() -> AxisGroup:
    return AxisGroup((0,), 0)


@dataclass(frozen=True)
class Settings:
    """How inputs of checkpointed parts are kept."""

    block: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    aio: AioConfig = field(default_factory=AioConfig)
    axis: AxisGroup = field(default_factory=_alone)
    """The tensor-parallel ranks."""

    def with_keys(self, given: Mapping[str, Any]) -> Self:
        """These with some keys of the block changed; None keeps a key.

        Raises:
            ArgumentError: keys that cannot be together, or values that are none of theirs.
        """
        changed = {key: value for key, value in given.items() if value is not None}
        block, errors = parse(ActivationCheckpointingConfig.model_validate, {**self.block.model_dump(), **changed})
        if errors or block is None:
            try:
                raise_faults(faults_of(errors, "activation_checkpointing"), "deepspeed.checkpointing.configure")
            except ConfigError as error:
                raise ArgumentError(str(error)) from error
        return replace(self, block=block)

    def build(self) -> Checkpointer:
        """The parts.

        Raises:
            FileIoError: no file can be made in `offload.nvme_path`.
        """
        block = self.block
        is_watched = block.profile or block.synchronize_checkpoint_boundary
        boundary = partial(Watched, is_timed=block.profile) if is_watched else NoBoundary
        return Checkpointer(self._keeper(), boundary, tracker)

    def _keeper(self) -> Keeper | None:
        """None where all inputs stay whole on the device."""
        block, shards = self.block, TensorShards(self.axis if self.block.partition_activations else _alone())
        place = self._place()
        if place is None:
            return None
        min_numel = 1 if self._device == "none" else block.offload.min_numel
        return Keeper(place, shards, ahead=block.offload.buffer_count, min_numel=min_numel)

    @property
    def _device(self) -> str:
        return "cpu" if self.block.cpu_checkpointing else self.block.offload.device

    def _place(self) -> Place | None:
        block, device = self.block, self._device
        if device == "nvme":
            assert block.offload.nvme_path is not None  # the block's own check
            return DiskPlace(
                IoEngine(IoSettings.of(self.aio)), Path(block.offload.nvme_path), ReusedBuffers(self._host_bytes), Lane()
            )
        if device == "cpu":
            return HostPlace(self._buffers(self._host_bytes, default=ReusedBuffers(self._host_bytes)), Lane())
        if block.contiguous_memory_optimization or (block.partition_activations and self.axis.size > 1):
            return DevicePlace(self._buffers(device_bytes, default=FreshBuffers(device_bytes)))
        return None

    def _buffers(self, make: MakeBytes, default: Buffers) -> Buffers:
        block = self.block
        if not block.contiguous_memory_optimization:
            return default
        assert block.number_checkpoints is not None  # the block's own check
        return ReusedBuffers(make, block.number_checkpoints, warns=True)

    def _host_bytes(self, nbytes: int) -> Any:
        return aligned_empty(nbytes, is_pinned=self.block.offload.pin_memory)
