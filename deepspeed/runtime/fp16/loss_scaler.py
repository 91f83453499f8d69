"""Door to `deepspeed.precision.loss_scaler`; this path is named inside checkpoints of the original."""

from __future__ import annotations

from deepspeed.precision.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler

__all__ = ["CreateLossScaler", "DynamicLossScaler", "LossScaler"]
