"""The tensors that a host step takes: what an engine hands to an optimizer, and what an optimizer hands to the kernels.

Tuples, not classes with checks: a step makes one per tensor, thousands of times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DTYPE_CODES", "KERNEL_DTYPES", "Part", "Update"]

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


class Part(NamedTuple):
    """One tensor of one call of the kernels. Dense, in host memory, of `KERNEL_DTYPES`, each tensor of its own dtype."""

    param: Tensor
    """What is updated."""

    grad: Tensor
    states: tuple[Tensor, ...]
    step: Tensor
    """0-d fp32: how many updates it has had; counts up before the update."""

    values: Tensor | None = None
    clears_grad: bool = False
