"""Door to `deepspeed.optim.schedules` and the command-line flags that tune them."""

from __future__ import annotations

from deepspeed.optim.schedules import (
    LR_RANGE_TEST,
    ONE_CYCLE,
    VALID_LR_SCHEDULES,
    WARMUP_COSINE_LR,
    WARMUP_DECAY_LR,
    WARMUP_LR,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from deepspeed.optim.tuning_arguments import add_tuning_arguments, get_config_from_args, get_lr_from_config, parse_arguments

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "parse_arguments",
]
