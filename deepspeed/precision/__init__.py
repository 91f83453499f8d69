"""How numbers are stored and scaled: the formats of a run (`formats`, `policy`) and its loss scale (`loss_scaler`).

Names load at first use: what a configuration asks for is read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.common.lazy import attach

if TYPE_CHECKING:
    from deepspeed.precision.loss_scaler import DynamicLossScaler as DynamicLossScaler
    from deepspeed.precision.loss_scaler import LossScaler as LossScaler
    from deepspeed.precision.loss_scaler import NullScaler as NullScaler
    from deepspeed.precision.loss_scaler import StaticLossScaler as StaticLossScaler
    from deepspeed.precision.loss_scaler import build_loss_scaler as build_loss_scaler
    from deepspeed.precision.policy import DtypePolicy as DtypePolicy
    from deepspeed.precision.policy import autocast_dtype as autocast_dtype
    from deepspeed.precision.policy import cast_module as cast_module

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

__getattr__, __dir__ = attach(
    __name__,
    names={
        "DtypePolicy": "deepspeed.precision.policy:DtypePolicy",
        "DynamicLossScaler": "deepspeed.precision.loss_scaler:DynamicLossScaler",
        "LossScaler": "deepspeed.precision.loss_scaler:LossScaler",
        "NullScaler": "deepspeed.precision.loss_scaler:NullScaler",
        "StaticLossScaler": "deepspeed.precision.loss_scaler:StaticLossScaler",
        "autocast_dtype": "deepspeed.precision.policy:autocast_dtype",
        "build_loss_scaler": "deepspeed.precision.loss_scaler:build_loss_scaler",
        "cast_module": "deepspeed.precision.policy:cast_module",
    },
)
