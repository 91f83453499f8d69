"""Door to `deepspeed.precision.loss_scaler`; this path is named inside checkpoints of the original."""

from __future__ import annotations

from deepspeed.precision.loss_scaler import DynamicLossScaler
from deepspeed.precision.loss_scaler import StaticLossScaler as LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
