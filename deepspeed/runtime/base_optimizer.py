"""Door to the base class of every optimizer that an engine returns."""

from __future__ import annotations

from deepspeed.zero.optimizer import DeepSpeedOptimizer
from deepspeed.zero.optimizer import ZeroOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
