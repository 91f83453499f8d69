"""Door to `deepspeed.checkpoint.save.engines`."""

from __future__ import annotations

from deepspeed.checkpoint.save.engines import CheckpointCommitInfo, CheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine"]
