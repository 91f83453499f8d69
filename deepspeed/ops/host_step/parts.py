"""The tensors that a host step takes: what an engine hands to an optimizer, and what an optimizer hands to the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DTYPE_CODES", "KERNEL_DTYPES", "Parts", "Update"]

DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""As `ds::Dtype` of csrc/core/step.h; 0 is no tensor."""

KERNEL_DTYPES = frozenset(DTYPE_CODES)
"""What the kernels read and write."""


class Update(NamedTuple):
    """One tensor of `GroupOptimizer.step_in_one_pass`. All tensors are in host memory, contiguous, of equal length."""

    param: Tensor
    """Key of the state and of the parameter groups; its memory is not looked at."""

    master: Tensor
    """1-D: what is updated."""

    grad: Tensor
    """1-D: read as it is, times the factor of the call."""

    values: Tensor | None = None
    """1-D: receives the new master, rounded; None: nobody wants it."""

    clears_grad: bool = False
    """Write zeros over the gradient once it is read."""


@dataclass
class Parts:
    """The tensors of one rule in one call of the kernels, as columns: number i of each list belongs to one parameter.

    Dense, in host memory, of `KERNEL_DTYPES`, each tensor of its own dtype. Columns, because a loop in Python over thousands
    of small tensors would cost more than their update.
    """

    params: list[Tensor]
    """What is updated."""

    grads: list[Tensor]
    states: list[list[Tensor]]
    """One list for each state of the rule."""

    steps: list[Tensor]
    """0-d fp32: how many updates each has had; count up before the update."""

    values: list[Tensor | None] | None = None
    """As `Update.values`; None: nobody's."""

    clears: list[bool] | None = None
    """As `Update.clears_grad`; None: nobody's."""

    common_dtypes: Sequence[torch.dtype | None] | None = None
    """Of parameters, gradients and each state, as far as all of a column are known to have one: nobody need look again."""

    def __len__(self) -> int:
        return len(self.params)
