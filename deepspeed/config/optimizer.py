"""The block `optimizer`, with one model of parameters per type that this library knows.

Lives here: names, parameters, defaults and ranges. Does not live here: which class is built (`optim.build`), and the
parameters of `torch.optim` classes that are used by name: this room knows no torch, so the builder checks those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from deepspeed.config.base import AUTO, WHO_FILLS_AUTO, ConfigModel, fault_line
from deepspeed.config.faults import Refusal, refuse
from deepspeed.config.values import Betas, Freeform, NonNegativeNumber, Number, PositiveNumber, PositiveWhole

__all__ = ["KNOWN_OPTIMIZERS", "OptimizerConfig", "ParamsModel"]


class ParamsModel(ConfigModel):
    """Parameters of one type: "auto" stands for a value that a client fills in."""

    left_out_when_none: ClassVar[frozenset[str]] = frozenset()
    """Keys that the builder sees only when they were given."""

    @classmethod
    def must_fill(cls, field: str) -> bool:
        """No parameter of an optimizer or schedule may stay "auto"."""
        return True

    def as_params(self) -> Freeform:
        """Return the keyword arguments: everything given, and the documented defaults."""
        params = self.model_dump()
        return {key: value for key, value in params.items() if value is not None or key not in self.left_out_when_none}


_TORCH_ONLY = ("foreach", "fused", "maximize", "capturable", "differentiable")


class _WithNorm(ParamsModel):
    max_grad_norm: NonNegativeNumber = 0.0
    """Old place of the top-level `gradient_clipping`, which takes this value over; 0 is off."""


class _Stepwise(_WithNorm):
    lr: NonNegativeNumber = 1e-3
    """Learning rate; a schedule changes it."""

    weight_decay: NonNegativeNumber = 0.0
    """Weight decay per step."""


class AdamParams(_Stepwise):
    """`optimizer.params` of Adam and AdamW."""

    left_out_when_none: ClassVar = frozenset(_TORCH_ONLY)

    betas: Betas = (0.9, 0.999)
    """Decay rates of the two moments, each >= 0 and < 1."""

    eps: NonNegativeNumber = 1e-8
    """Added to the denominator."""

    bias_correction: bool = True
    """Correct the moments for their start at zero."""

    amsgrad: bool = False
    """Use the largest second moment so far."""

    adam_w_mode: bool = True
    """Decouple weight decay from the gradient (AdamW). Type AdamW always does, so this makes Adam mean AdamW too; set it
    to false for L2 decay."""

    torch_adam: bool = False
    """Use torch's own Adam or AdamW."""

    set_grad_none: bool = True
    """Free gradients after the step instead of zeroing them."""

    fp32_optimizer_states: bool = True
    """Keep the moments in fp32 when the optimizer is offloaded to the CPU."""

    foreach: bool | None = None
    """Passed to torch's Adam; with `torch_adam` only."""

    fused: bool | None = None
    """Passed to torch's Adam; with `torch_adam` only."""

    maximize: bool | None = None
    """Passed to torch's Adam; with `torch_adam` only."""

    capturable: bool | None = None
    """Passed to torch's Adam; with `torch_adam` only."""

    differentiable: bool | None = None
    """Passed to torch's Adam; with `torch_adam` only."""

    def check(self) -> Iterable[Refusal]:
        """Some arguments are torch's alone."""
        for key in _TORCH_ONLY:
            if getattr(self, key) is not None and not self.torch_adam:
                yield Refusal(key, "needed torch_adam = true with it", "Leave it out, or set torch_adam.")


class AdagradParams(_WithNorm):
    """`optimizer.params` of Adagrad."""

    left_out_when_none: ClassVar = frozenset(("lr_decay", "initial_accumulator_value", "foreach", "fused", "maximize", "differentiable"))

    lr: NonNegativeNumber = 1e-2
    """Learning rate; a schedule changes it."""

    eps: NonNegativeNumber = 1e-10
    """Added to the denominator."""

    weight_decay: NonNegativeNumber = 0.0
    """L2 penalty."""

    fp32_optimizer_states: bool = True
    """Keep the sums in fp32 when the optimizer is offloaded to the CPU."""

    lr_decay: NonNegativeNumber | None = None
    """Passed to torch's Adagrad when given."""

    initial_accumulator_value: NonNegativeNumber | None = None
    """Passed to torch's Adagrad when given."""

    foreach: bool | None = None
    """Passed to torch's Adagrad when given."""

    fused: bool | None = None
    """Passed to torch's Adagrad when given."""

    maximize: bool | None = None
    """Passed to torch's Adagrad when given."""

    differentiable: bool | None = None
    """Passed to torch's Adagrad when given."""


class LionParams(_Stepwise):
    """`optimizer.params` of Lion (arXiv:2302.06675)."""

    betas: Betas = (0.9, 0.999)
    """Decay rates of the update and of the moment, each >= 0 and < 1."""

    set_grad_none: bool = True
    """Free gradients after the step instead of zeroing them."""

    fp32_optimizer_states: bool = True
    """Keep the moment in fp32 when the optimizer is offloaded to the CPU."""


class _AdamLike(_Stepwise):
    betas: Betas = (0.9, 0.999)
    """Decay rates of the two moments, each >= 0 and < 1."""

    eps: NonNegativeNumber = 1e-8
    """Added to the denominator."""

    eps_inside_sqrt: bool = False
    """Add `eps` before the square root instead of after it."""

    bias_correction: bool = True
    """Correct the moments for their start at zero."""

    amsgrad: bool = False
    """Use the largest second moment so far; only false is accepted."""

    def check(self) -> Iterable[Refusal]:
        """These types have no AMSGrad form."""
        if self.amsgrad:
            yield Refusal("amsgrad", "needed false: this optimizer has no AMSGrad form", "Leave it out, or use Adam.")


class LambParams(_AdamLike):
    """`optimizer.params` of Lamb (arXiv:1904.00962)."""

    max_coeff: PositiveNumber = 10.0
    """Upper limit of the trust ratio."""

    min_coeff: NonNegativeNumber = 0.01
    """Lower limit of the trust ratio."""

    set_grad_none: bool = True
    """Free gradients after the step instead of zeroing them."""


class _Compressed(_AdamLike):
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
    model_config = {"extra": "allow"}

    lr: NonNegativeNumber = 1e-3
    """Learning rate before the `mup` package scales it by width."""


class MuAdamParams(_MuParams):
    """`optimizer.params` of MuAdam: passed to `mup.MuAdam`."""


class MuAdamWParams(_MuParams):
    """`optimizer.params` of MuAdamW: passed to `mup.MuAdamW`."""


class MuSGDParams(_MuParams):
    """`optimizer.params` of MuSGD: passed to `mup.MuSGD`."""


class MuonParams(_WithNorm):
    """`optimizer.params` of Muon: orthogonalised momentum for matrices, Adam for the rest."""

    left_out_when_none: ClassVar = frozenset(("muon_lr", "adam_lr"))

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


_Models = Mapping[str, type[ParamsModel]]

KNOWN_OPTIMIZERS: _Models = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "OneBitAdam": OneBitAdamParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "OneBitLamb": OneBitLambParams,
    "MuAdam": MuAdamParams,
    "MuAdamW": MuAdamWParams,
    "MuSGD": MuSGDParams,
    "Muon": MuonParams,
}
"""Type -> model of its parameters. Any other type is a class of `torch.optim`, such as SGD."""


class TypedBlock(ConfigModel):
    """A block with a `type` and the `params` that go with it."""

    known: ClassVar[_Models] = {}
    """Canonical type -> model of its parameters."""

    type: str = Field(min_length=1)
    """Name of the class."""

    params: Freeform = Field(default_factory=dict, validate_default=True)
    """Its keyword arguments."""

    @field_validator("type", mode="after")
    @classmethod
    def _canonical(cls, name: str) -> str:
        by_lower = {known.lower(): known for known in cls.known}
        canonical = by_lower.get(name.lower(), name)
        if not canonical.isidentifier():
            raise refuse("needed the name of a class", f"Known here: {', '.join(cls.known)}.")
        return canonical

    @field_validator("params", mode="before")
    @classmethod
    def _typed(cls, params: object, info: ValidationInfo) -> object:
        """Check the parameters of a known type; refuse "auto" for every type."""
        if params is None:
            params = {}
        kind = info.data.get("type")
        if not isinstance(params, Mapping) or kind is None:
            return params
        if kind in cls.known:
            return cls.known[kind].model_validate(params).as_params()
        unfilled = [key for key, value in params.items() if isinstance(value, str) and value == AUTO]
        if unfilled:
            lines = [fault_line((key,), AUTO, 'needed a value in place of "auto"', WHO_FILLS_AUTO) for key in unfilled]
            raise ValidationError.from_exception_data(kind, lines)
        return dict(params)


class OptimizerConfig(TypedBlock):
    """`optimizer`: which optimizer the engine builds when it is handed none."""

    known: ClassVar = KNOWN_OPTIMIZERS

    type: str = Field(min_length=1)
    """A type of this library, in any case, or the exact name of a class in `torch.optim`."""

    params: Freeform = Field(default_factory=dict, validate_default=True)
    """Keyword arguments of that type."""

    legacy_fusion: bool = False
    """Old step path of fused Adam under fp16. Accepted; there is one path."""
