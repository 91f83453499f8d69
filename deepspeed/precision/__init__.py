"""How numbers are stored and scaled: the formats of a run (`policy`) and its loss scale (`loss_scaler`)."""

from deepspeed.precision.loss_scaler import (
    DynamicLossScaler,
    LossScaler,
    NullScaler,
    StaticLossScaler,
    build_loss_scaler,
)
from deepspeed.precision.policy import DtypePolicy, autocast_dtype, cast_module

__all__ = [
    "DtypePolicy",
    "DynamicLossScaler",
    "LossScaler",
    "NullScaler",
    "StaticLossScaler",
    "autocast_dtype",
    "build_loss_scaler",
    "cast_module",
]
