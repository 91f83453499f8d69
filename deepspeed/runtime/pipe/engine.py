"""Door to `deepspeed.engine.pipeline`."""

from __future__ import annotations

from deepspeed.engine.pipeline import PipelineEngine

__all__ = ["PipelineEngine"]
