"""Door to `deepspeed.checkpoint.save.engines`."""

from __future__ import annotations

from deepspeed.checkpoint.save.engines import TorchCheckpointEngine

__all__ = ["TorchCheckpointEngine"]
