"""Doors for names that checkpoints of the original pickle."""

from __future__ import annotations

from deepspeed.common.lazy import attach

__all__ = ["loss_scaler"]

__getattr__, __dir__ = attach(__name__, submodules=("loss_scaler",))
