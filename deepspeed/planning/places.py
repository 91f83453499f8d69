"""Where the parts of one engine rest: `offload_optimizer` and `offload_param` read. Pure: no torch.

    masters, optimizer state   device | host | files
    this rank's gradients      device | host
    weights (stage 3)          device | host

On a CPU host memory is the device's: "cpu" moves nothing there. Called by `formula`, and by `tiers`, which adds bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from typing_extensions import Self

from deepspeed.config import DeepSpeedConfig
from deepspeed.offload import placement
from deepspeed.planning.terms import Tier

__all__ = ["Places"]


@dataclass(frozen=True)
class Places:
    """Where the parts of one engine rest."""

    config: DeepSpeedConfig
    is_apart: bool
    """Whether host memory is other memory than the device's."""

    is_cpu: bool
    """Whether the device is the CPU."""

    @classmethod
    def of(cls, config: DeepSpeedConfig, device_type: str) -> Self:
        """Those on a kind of device."""
        return cls(config, placement.is_host_apart(SimpleNamespace(type=device_type)), device_type == "cpu")

    @property
    def state(self) -> Tier:
        """Of masters and optimizer state."""
        zero = self.config.zero_optimization
        block = zero.offload_optimizer
        return self._tier(block.device) if block is not None and zero.offloads_optimizer else "device"

    @property
    def gradient(self) -> Tier:
        """Of this rank's gradients."""
        return "host" if self.state != "device" and self.is_apart else "device"

    @property
    def weight(self) -> Tier:
        """Of sharded weights, those that do not rest in a file."""
        block = self.config.zero_optimization.offload_param
        is_moved = self.config.zero_optimization.stage == 3 and block is not None and block.device != "none"
        return "host" if is_moved and self.is_apart else "device"

    def _tier(self, device: str) -> Tier:
        return "nvme" if device == "nvme" else "host" if device == "cpu" and self.is_apart else "device"
