"""The block `optimizer`: the types that this library knows, and the names of the models of their parameters.

Lives here: names. Does not live here: parameters (`config.optimizer_params`, `config.optimizer_params_more`), which class is
built (`optim.build`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from deepspeed.config.typed import TypedBlock
from deepspeed.config.values import Freeform

__all__ = ["KNOWN_OPTIMIZERS", "OptimizerConfig"]

KNOWN_OPTIMIZERS: Mapping[str, str] = {
    "Adam": "optimizer_params:AdamParams",
    "AdamW": "optimizer_params:AdamParams",
    "Adagrad": "optimizer_params:AdagradParams",
    "Lion": "optimizer_params:LionParams",
    "Lamb": "optimizer_params:LambParams",
    "OneBitAdam": "optimizer_params_more:OneBitAdamParams",
    "ZeroOneAdam": "optimizer_params_more:ZeroOneAdamParams",
    "OneBitLamb": "optimizer_params_more:OneBitLambParams",
    "MuAdam": "optimizer_params_more:MuAdamParams",
    "MuAdamW": "optimizer_params_more:MuAdamWParams",
    "MuSGD": "optimizer_params_more:MuSGDParams",
    "Muon": "optimizer_params_more:MuonParams",
}
"""Type -> model of its parameters. Any other type is a class of `torch.optim`, such as SGD."""


class OptimizerConfig(TypedBlock):
    """`optimizer`: which optimizer the engine builds when it is handed none."""

    known: ClassVar[Mapping[str, str]] = KNOWN_OPTIMIZERS

    type: str = Field(min_length=1)
    """A type of this library, in any case, or the exact name of a class in `torch.optim`."""

    params: Freeform = Field(default_factory=dict, validate_default=True)
    """Keyword arguments of that type."""

    legacy_fusion: bool = False
    """Old step path of fused Adam under fp16. Accepted; there is one path."""
