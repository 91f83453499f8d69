"""Door to the block `zero_optimization`, and to the enum that the original's files name by this path."""

from __future__ import annotations

from deepspeed.checkpoint.original.stand_ins import ZeroStageEnum
from deepspeed.config.zero import ZeroConfig as DeepSpeedZeroConfig

__all__ = ["DeepSpeedZeroConfig", "ZeroStageEnum"]
