"""Doors to `deepspeed.zero`: the same names, and the paths of the original's modules."""

from __future__ import annotations

from deepspeed import zero
from deepspeed.common.lazy import attach

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "tiling",
    "unwrap_model_for_generation",
    "utils",
]
_SUBMODULES = ("config", "offload_config", "partition_parameters", "stage3", "stage_1_and_2", "tiling", "utils")

__getattr__, __dir__ = attach(
    __name__,
    submodules=_SUBMODULES,
    names={name: f"deepspeed.zero:{name}" for name in __all__ if name not in _SUBMODULES},
    unbuilt=zero.UNBUILT,
)
