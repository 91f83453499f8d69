"""LAMB: `FusedLamb`."""

from deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
