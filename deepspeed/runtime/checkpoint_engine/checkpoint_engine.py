"""Door to `deepspeed.checkpoint.engines`."""

from __future__ import annotations

from deepspeed.checkpoint.engines import CheckpointCommitInfo, CheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine"]
