"""Doors to `deepspeed.checkpoint.save.engines`: what says where bytes go, and a client's own state dicts on the disk."""

from __future__ import annotations

from deepspeed.common.lazy import attach

_SUBMODULES = ("checkpoint_engine", "torch_checkpoint_engine")

__all__ = [
    "CheckpointCommitInfo",
    "CheckpointEngine",
    "DataStatesCheckpointEngine",
    "DecoupledCheckpointEngine",
    "FastCheckpointEngine",
    "TorchCheckpointEngine",
    "checkpoint_engine",
    "torch_checkpoint_engine",
]

__getattr__, __dir__ = attach(
    __name__,
    submodules=_SUBMODULES,
    names={name: f"deepspeed.checkpoint.save.engines:{name}" for name in __all__ if name not in _SUBMODULES},
)
