"""Parameters of the usual optimizers: Adam, AdamW, Adagrad, Lion, Lamb.

Lives here: `optimizer.params` of these types, with defaults and ranges. Does not live here: the optimizers (`optim`, `ops`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from deepspeed.config.faults import Refusal
from deepspeed.config.typed import ParamsModel
from deepspeed.config.values import Betas, NonNegativeNumber, PositiveNumber

__all__ = ["AdagradParams", "AdamLike", "AdamParams", "LambParams", "LionParams", "WithNorm"]

_TORCH_ONLY = ("foreach", "fused", "maximize", "capturable", "differentiable")


class WithNorm(ParamsModel):
    """Base: the old place of clipping."""

    max_grad_norm: NonNegativeNumber = 0.0
    """Old place of the top-level `gradient_clipping`, which takes this value over; 0 is off."""


class Stepwise(WithNorm):
    """Base: a rate and a decay."""

    lr: NonNegativeNumber = 1e-3
    """Learning rate; a schedule changes it."""

    weight_decay: NonNegativeNumber = 0.0
    """Weight decay per step."""


class AdamParams(Stepwise):
    """`optimizer.params` of Adam and AdamW."""

    left_out_when_none: ClassVar[frozenset[str]] = frozenset(_TORCH_ONLY)

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


class AdagradParams(WithNorm):
    """`optimizer.params` of Adagrad."""

    left_out_when_none: ClassVar[frozenset[str]] = frozenset(
        ("lr_decay", "initial_accumulator_value", "foreach", "fused", "maximize", "differentiable")
    )

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


class LionParams(Stepwise):
    """`optimizer.params` of Lion (arXiv:2302.06675)."""

    betas: Betas = (0.9, 0.999)
    """Decay rates of the update and of the moment, each >= 0 and < 1."""

    set_grad_none: bool = True
    """Free gradients after the step instead of zeroing them."""

    fp32_optimizer_states: bool = True
    """Keep the moment in fp32 when the optimizer is offloaded to the CPU."""


class AdamLike(Stepwise):
    """Base: two moments."""

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


class LambParams(AdamLike):
    """`optimizer.params` of Lamb (arXiv:1904.00962)."""

    max_coeff: PositiveNumber = 10.0
    """Upper limit of the trust ratio."""

    min_coeff: NonNegativeNumber = 0.01
    """Lower limit of the trust ratio."""

    set_grad_none: bool = True
    """Free gradients after the step instead of zeroing them."""
