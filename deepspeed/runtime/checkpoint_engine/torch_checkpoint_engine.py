"""Door to `deepspeed.checkpoint.engines`."""

from __future__ import annotations

from deepspeed.checkpoint.engines import TorchCheckpointEngine

__all__ = ["TorchCheckpointEngine"]
