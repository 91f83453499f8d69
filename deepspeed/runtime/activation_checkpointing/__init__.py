"""Door to activation checkpointing."""

from deepspeed.common.lazy import attach

__all__ = ["checkpointing"]

__getattr__, __dir__ = attach(__name__, submodules=("checkpointing",))
