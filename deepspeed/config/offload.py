"""Names of places and of kinds of state, for clients that name them by enum.

Lives here: `OffloadDeviceEnum` and `OffloadStateTypeEnum`; members equal their texts, so either may be passed. Does not live
here: the blocks that use them (`config.zero`). Called by clients and by `engine.offload_states`.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]


class OffloadDeviceEnum(str, Enum):
    """Where something rests while it is not in use."""

    none = "none"
    """On the device."""
    cpu = "cpu"
    """In host memory."""
    nvme = "nvme"
    """In a file."""


class OffloadStateTypeEnum(str, Enum):
    """What can be moved off the device between steps."""

    optim_states = "optim_states"
    """Moments of the optimizer."""
    hp_params = "hp_params"
    """Full-precision masters."""
    lp_params = "lp_params"
    """The parameters that the model computes with."""
    lp_grads = "lp_grads"
    """Gradients."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """The buffer that gradients are reduced in."""
