"""Measuring what a model does: operations, parameters and time of its modules."""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = ["flops_profiler"]

__getattr__, __dir__ = attach(__name__, submodules=("flops_profiler",))
