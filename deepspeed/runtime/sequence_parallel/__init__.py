"""Doors to sequence parallelism: `deepspeed.sequence`."""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = ["parallel_state_sp", "ulysses_sp"]

__getattr__, __dir__ = attach(__name__, submodules=("parallel_state_sp", "ulysses_sp"))
