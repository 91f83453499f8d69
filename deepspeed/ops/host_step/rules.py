"""What each update computes, and the numbers it takes from a parameter group.

A rule names its kernel by `code` and hands its numbers over in the order of `ds::Number` in csrc/core/step.h. The twin asks
for the same numbers by name. Everything that depends on the count of steps is computed in double, once per tensor.

Sources: Adam (arXiv:1412.6980) algorithm 1, in the form at the end of section 2, which moves the bias corrections into rate
and eps; AdamW (arXiv:1711.05101) algorithm 2; Adagrad (JMLR 12, 2011) figure 1, diagonal; Lion (arXiv:2302.06675) algorithm
2; LAMB (arXiv:1904.00962) algorithm 2. SGD as torch.optim.SGD defines dampening, momentum and nesterov.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["NUMBERS", "Adagrad", "Adam", "Lamb", "Lion", "Rule", "Sgd"]

NUMBERS = 9
"""Numbers of one row: rate, beta1, beta2, eps, weight decay, two flags, trust ratio, gradient factor."""


@dataclass(frozen=True)
class Rule:
    """Base of the rules.

    Attributes:
        lr: learning rate.
        weight_decay: share of the parameter; where it acts is the rule's.
    """

    code: ClassVar[int]
    operator: ClassVar[str]
    """Whose code in the native library it is (`ops.op_builder`)."""

    states: ClassVar[int]
    """State tensors per parameter."""

    lr: float
    weight_decay: float = 0.0

    def __init_subclass__(cls, *, code: int, operator: str, states: int) -> None:
        super().__init_subclass__()
        cls.code, cls.operator, cls.states = code, operator, states

    def row(self, factor: float, ratio: float = 1.0) -> tuple[float, ...]:
        """The numbers as the kernels read them."""
        beta1, beta2, eps, flag0, flag1 = self._own()
        return (self.lr, beta1, beta2, eps, self.weight_decay, float(flag0), float(flag1), ratio, factor)

    def _own(self) -> tuple[float, float, float, bool, bool]:
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Rule, code=0, operator="cpu_adam", states=2):
    """Moments of the gradient: `exp_avg`, `exp_avg_sq`. Decay of the parameter (AdamW), or added to the gradient (L2)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    is_decoupled: bool = True
    is_corrected: bool = True

    def rate_and_eps(self, step: float) -> tuple[float, float]:
        """Rate and eps of update number `step`, bias corrections included."""
        if not self.is_corrected:
            return self.lr, self.eps
        root = math.sqrt(1.0 - self.beta2**step)
        return self.lr * root / (1.0 - self.beta1**step), self.eps * root

    def _own(self) -> tuple[float, float, float, bool, bool]:
        return self.beta1, self.beta2, self.eps, self.is_decoupled, self.is_corrected


@dataclass(frozen=True)
class Adagrad(Rule, code=1, operator="cpu_adagrad", states=1):
    """Sum of squares of the gradient; decay is added to the gradient."""

    eps: float = 1e-10

    def _own(self) -> tuple[float, float, float, bool, bool]:
        return 0.0, 0.0, self.eps, False, False


@dataclass(frozen=True)
class Lion(Rule, code=2, operator="cpu_lion", states=1):
    """One momentum; decay of the parameter."""

    beta1: float = 0.9
    beta2: float = 0.99

    def _own(self) -> tuple[float, float, float, bool, bool]:
        return self.beta1, self.beta2, 0.0, False, False


@dataclass(frozen=True)
class Sgd(Rule, code=3, operator="cpu_adam", states=1):
    """One momentum (not 0), which starts as the first gradient; decay is added to the gradient."""

    momentum: float = 0.9
    dampening: float = 0.0
    is_nesterov: bool = False

    def _own(self) -> tuple[float, float, float, bool, bool]:
        return self.momentum, self.dampening, 0.0, self.is_nesterov, False


@dataclass(frozen=True)
class Lamb(Rule, code=4, operator="fused_lamb", states=2):  # the code of the first pass; the second has the next
    """Adam's moments; the update, decay included, is scaled by a ratio that needs its norm: two passes."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    is_eps_inside: bool = False
    is_corrected: bool = True

    def corrections(self, step: float) -> tuple[float, float]:
        """What the moments are multiplied by at update number `step`."""
        if not self.is_corrected:
            return 1.0, 1.0
        return 1.0 / (1.0 - self.beta1**step), 1.0 / (1.0 - self.beta2**step)

    def _own(self) -> tuple[float, float, float, bool, bool]:
        return self.beta1, self.beta2, self.eps, self.is_eps_inside, self.is_corrected
