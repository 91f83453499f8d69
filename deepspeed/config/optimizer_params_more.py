"""Parameters of the less usual optimizers: the compressed ones, those of the `mup` package, Muon.

Lives here: `optimizer.params` of these types, with defaults and ranges. Does not live here: the optimizers (`optim`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from deepspeed.config.optimizer_params import AdamLike, WithNorm
from deepspeed.config.typed import ParamsModel
from deepspeed.config.values import Betas, NonNegativeNumber, Number, PositiveNumber, PositiveWhole

__all__ = [
    "MuAdamParams",
    "MuAdamWParams",
    "MuSGDParams",
    "MuonParams",
    "OneBitAdamParams",
    "OneBitLambParams",
    "ZeroOneAdamParams",
]


class _Compressed(AdamLike):
    cuda_aware: bool = False
    """The MPI library reads device memory itself."""

    comm_backend_name: Literal["nccl", "mpi", "gloo", "hccl", "compressed"] = "nccl"
    """Back end of the compressed all-reduce."""


class OneBitAdamParams(_Compressed):
    """`optimizer.params` of OneBitAdam (arXiv:2102.02888)."""

    freeze_step: PositiveWhole = 100_000
    """Steps of plain Adam before compression starts."""


class ZeroOneAdamParams(_Compressed):
    """`optimizer.params` of ZeroOneAdam (arXiv:2202.06009)."""

    var_freeze_step: PositiveWhole = 100_000
    """Step after which the variance no longer changes."""

    var_update_scaler: PositiveWhole = 16
    """How fast the interval between variance updates grows."""

    local_step_scaler: PositiveWhole = 32_678
    """How fast the interval between synchronised steps grows."""

    local_step_clipper: PositiveWhole = 16
    """Upper limit of the interval between synchronised steps."""


class OneBitLambParams(_Compressed):
    """`optimizer.params` of OneBitLamb (arXiv:2104.06069)."""

    freeze_step: PositiveWhole = 100_000
    """Steps of plain Lamb before compression starts."""

    max_coeff: PositiveNumber = 10.0
    """Upper limit of the trust ratio."""

    min_coeff: NonNegativeNumber = 0.01
    """Lower limit of the trust ratio."""

    coeff_beta: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the average trust ratio."""

    factor_max: PositiveNumber = 4.0
    """Upper limit of the factor on the frozen trust ratio."""

    factor_min: NonNegativeNumber = 0.5
    """Lower limit of the factor on the frozen trust ratio."""

    factor_threshold: NonNegativeNumber = 0.1
    """Most that the factor changes in one step."""


class _MuParams(ParamsModel):
    model_config = ConfigDict(extra="allow")

    lr: NonNegativeNumber = 1e-3
    """Learning rate before the `mup` package scales it by width."""


class MuAdamParams(_MuParams):
    """`optimizer.params` of MuAdam: passed to `mup.MuAdam`."""


class MuAdamWParams(_MuParams):
    """`optimizer.params` of MuAdamW: passed to `mup.MuAdamW`."""


class MuSGDParams(_MuParams):
    """`optimizer.params` of MuSGD: passed to `mup.MuSGD`."""


class MuonParams(WithNorm):
    """`optimizer.params` of Muon: orthogonalised momentum for matrices, Adam for the rest."""

    left_out_when_none: ClassVar[frozenset[str]] = frozenset(("muon_lr", "adam_lr"))

    lr: NonNegativeNumber = 0.02
    """Learning rate of both parts."""

    muon_lr: NonNegativeNumber | None = None
    """Learning rate of the matrices. Left out: `lr`."""

    adam_lr: NonNegativeNumber | None = None
    """Learning rate of the rest. Left out: `lr`."""

    momentum: Annotated[Number, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the matrices' momentum."""

    weight_decay: NonNegativeNumber = 0.0
    """Decoupled weight decay of both parts."""

    betas: Betas = (0.9, 0.999)
    """Decay rates of Adam's moments, each >= 0 and < 1."""

    eps: NonNegativeNumber = 1e-8
    """Added to Adam's denominator."""

    ns_method: Literal["gram", "standard"] = "gram"
    """Form of the Newton-Schulz iteration."""

    per_head_muon: bool = False
    """Orthogonalise attention projections head by head."""

    adam_w_mode: bool = True
    """Decouple weight decay in the Adam part."""

    torch_adam: bool = False
    """Use torch's own Adam for the rest."""
