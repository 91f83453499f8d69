"""Door to the names of places and kinds of state, and the two offload blocks."""

from __future__ import annotations

from deepspeed.config.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.config.zero import OffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.config.zero import OffloadParamConfig as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
