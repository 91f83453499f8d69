"""Door for an old path: the rules and layers of AutoTP live in `deepspeed.tensor_parallel`."""

from __future__ import annotations

from deepspeed.module_inject.layers import (
    EmbeddingLayer,
    GatherReplacedLayerParams,
    LinearAllreduce,
    LinearLayer,
    SubParamLinearAllreduce,
    SubParamLinearLayer,
)
from deepspeed.tensor_parallel.specs import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)

__all__ = [
    "AutoTPConfig",
    "AutoTPPresets",
    "EmbeddingLayer",
    "GatherReplacedLayerParams",
    "LinearAllreduce",
    "LinearLayer",
    "PartitionType",
    "SubParamLinearAllreduce",
    "SubParamLinearLayer",
    "TPLayerSpec",
    "merge_autotp_configs",
]
