"""Random numbers of routing, from the device's own stream.

Lives here: the three draws. They are what the original draws, in shape and order, so equal seeds route equally on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Gumbel

__all__ = ["gumbel_like", "jitter", "uniform_like"]

_JITTER = 1e-2


def gumbel_like(logits: Tensor) -> Tensor:
    """Standard Gumbel noise: the largest of logits + noise is a sample of their softmax."""
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    noise: Tensor = Gumbel(zero, torch.ones_like(zero), validate_args=False).rsample(logits.shape)
    return noise


def uniform_like(logits: Tensor) -> Tensor:
    """Uniform numbers in [0, 1)."""
    return torch.rand(logits.shape, dtype=logits.dtype, device=logits.device)


def jitter(hidden: Tensor, epsilon: float = _JITTER) -> Tensor:
    """Multiply each element by its own uniform number in [1 - epsilon, 1 + epsilon).

    Source: Switch (arXiv:2101.03961), section 2.4, "input jitter".
    """
    return hidden * torch.empty_like(hidden).uniform_(1.0 - epsilon, 1.0 + epsilon)
