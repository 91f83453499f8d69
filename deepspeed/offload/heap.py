"""Memory that the C library keeps after it was freed, given back to the system where memory is what a tier is for.

Freed blocks of up to 32 MiB stay in glibc's heap: after a model was laid out or loaded that is as much as the model. Called
by `engine.build` and `engine.loading`, when they are done.
"""

from __future__ import annotations

import ctypes

from deepspeed.config.zero import ZeroConfig

__all__ = ["give_back_freed"]


def give_back_freed(zero: ZeroConfig) -> None:
    """Do so where something rests on a disk, and the C library can."""
    blocks = (zero.offload_param, zero.offload_optimizer)
    if zero.stage == 0 or not any(block is not None and block.device == "nvme" for block in blocks):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
