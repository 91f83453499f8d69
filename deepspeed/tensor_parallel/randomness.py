"""Dropout where ranks hold parts of an activation: other numbers on each rank, and alike in recomputation.

    common stream  ----------*--------------------------------*------------>     what is whole: alike on all ranks
                             | one number                     | goes on
    own stream               '--> seed + place: dropout of parts

Between a column and a row layer activations are parts. There a rank draws from generators that were seeded with one number
of the common stream and its own place, so whoever recomputes the block from the same common state draws the same again.

Lives here: leaving the common stream and coming back. Called by hooks on the layers of a block, in training alone. The
common stream is alike to begin with: `deepspeed.initialize` sees to it. An exception between the two leaves the own stream
on; recomputation, which may stop in the middle, restores the generators itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator

__all__ = ["OwnStream", "has_dropout"]

_SEEDS = 2**31
_STRIDE = 2**31 + 11  # places are further apart than seeds


class OwnStream:
    """Of one block on one rank."""

    def __init__(self, place: int) -> None:
        """Store this rank's place on the axis."""
        self._place = place
        self._common: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def attach(self, block: nn.Module, columns: list[nn.Module], row: nn.Module) -> None:
        """Let the layers of a block say when parts begin and end."""
        block.register_forward_pre_hook(self.before_block)
        for column in columns:
            column.register_forward_pre_hook(self.before_column)
        row.register_forward_pre_hook(self.before_row)

    def before_block(self, module: nn.Module, args: Any) -> None:
        """Forget a forward that ended in the middle."""
        self._common = None

    def before_column(self, module: nn.Module, args: Any) -> None:
        """Leave the common stream, at the first column."""
        if not module.training or self._common is not None:
            return
        seed = int(torch.randint(_SEEDS, ())) + self._place * _STRIDE
        accelerator = get_accelerator()
        has_device = accelerator.device_name() != "cpu"
        self._common = torch.get_rng_state(), accelerator.get_rng_state() if has_device else None
        torch.default_generator.manual_seed(seed)
        if has_device:
            accelerator.manual_seed(seed)

    def before_row(self, module: nn.Module, args: Any) -> None:
        """Go back to it."""
        if self._common is None:
            return
        host, device = self._common
        self._common = None
        torch.set_rng_state(host)
        if device is not None:
            get_accelerator().set_rng_state(device)


def has_dropout(block: nn.Module) -> bool:
    """Whether a block drops anything: a module of it, or a rate in an attribute named so."""
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in block.modules()):
        return True
    rates = [value for name, value in vars(block).items() if "drop" in name and isinstance(value, float)]
    return any(rate > 0 for rate in rates)
