"""Doors only: the paths that code written for the original imports. Nothing lives here, and nothing inside imports it."""

from __future__ import annotations

from deepspeed.common.lazy import attach

_SUBMODULES = (
    "activation_checkpointing",
    "base_optimizer",
    "checkpoint_engine",
    "chunked_cross_entropy",
    "config",
    "config_utils",
    "constants",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "pipe",
    "sequence_parallel",
    "utils",
    "zero",
)

__all__ = [*_SUBMODULES]

__getattr__, __dir__ = attach(__name__, submodules=_SUBMODULES)
