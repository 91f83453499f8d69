"""Door to the block `zero_optimization`."""

from __future__ import annotations

from deepspeed.config.zero import ZeroConfig as DeepSpeedZeroConfig

__all__ = ["DeepSpeedZeroConfig"]
