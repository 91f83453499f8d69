"""What becomes of one update: the gradient norm, and whether it is skipped; known at once, or when the device got that far.

    sum of squares over ranks ---> norm, overflow                    the host decides: it needs the number now
                         `-------> factor, skip flag on the device   the device decides: the host reads the number later

A client may ask for the skip (`optimizer.skip_step`): the rank that asks adds -infinity to a sum that is never negative
otherwise, and all ranks learn of it by the number that they share anyway.

The host decides where reading costs nothing (the CPU), where the loss scale depends on it (fp16), and where the optimizer
cannot be told by a flag to leave everything as it is. Elsewhere nothing in a step waits for the device.

Called by `zero.optimizer`; `engine.engine` asks when the answer is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.accelerator.late import LateNumber

__all__ = ["CLIP_EPS", "REQUESTED", "Late", "Outcome"]

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_, with which the numbers agree
REQUESTED = -math.inf


class Late(Protocol):
    """A number that may take a while: `accelerator.late.LateNumber`."""

    def is_ready(self) -> bool:
        """Whether `get` returns at once."""

    def get(self) -> float:
        """The number."""


class Outcome:
    """The judgement on the gradients of one update, the same on all ranks.

    Args:
        total: 0-d: the sum of squares of all gradients as they lie in their buffers; or, with `is_norm` False, any number
            from 0 up that is finite when they are. `REQUESTED` added to it asks for the skip.
        base: factor that turns the buffers' values into the gradient of the mean loss.
        clip: largest global norm, 0 for none.
        is_norm: see `total`.
        skips_nonfinite: whether non-finite gradients skip the update.
        read: how `total` gets to the host.
    """

    def __init__(
        self,
        total: Tensor,
        base: float,
        *,
        clip: float,
        is_norm: bool = True,
        skips_nonfinite: bool = True,
        read: Callable[[Tensor], Late] = LateNumber,
    ) -> None:
        self._total = total
        self._base = base
        self._clip = clip
        self._is_norm = is_norm
        self._skips_nonfinite = skips_nonfinite
        self._late = read(total)

    def is_known(self) -> bool:
        """Whether the host can ask without waiting."""
        return self._late.is_ready()

    @property
    def norm(self) -> float | None:
        """Global gradient norm before clipping; None where it is not computed, or not kept. Waits until it is known."""
        if not self._is_norm or self.is_requested:
            return None
        squares = self._late.get()
        return math.sqrt(squares) * self._base if squares >= 0 else math.nan

    @property
    def has_overflow(self) -> bool:
        """Whether the update is skipped. Waits until it is known."""
        return self.is_requested or (self._skips_nonfinite and not math.isfinite(self._late.get()))

    @property
    def is_requested(self) -> bool:
        """Whether it is skipped because a client asked, not for its gradients. Waits until it is known."""
        return self._late.get() == REQUESTED

    def factor(self) -> float:
        """What gradients are multiplied by: unscaled, averaged, clipped. Waits until it is known."""
        if self._clip <= 0 or not self._is_norm:
            return self._base
        norm = self.norm
        assert norm is not None  # is_norm
        return self._base * min(1.0, self._clip / (norm + CLIP_EPS))

    def factor_on_device(self) -> float | Tensor:
        """The same as `factor`, without waiting: 0-d fp32 where it depends on the norm."""
        if self._clip <= 0 or not self._is_norm:
            return self._base
        coefficient = self._clip / (self._total.sqrt() * self._base + CLIP_EPS)
        return (coefficient.clamp(max=1.0) * self._base).float()

    def skip_on_device(self) -> Tensor | None:
        """0-d fp32, 1 where the update is skipped; None when nothing is ever skipped."""
        return torch.isfinite(self._total).logical_not().float() if self._skips_nonfinite else None
