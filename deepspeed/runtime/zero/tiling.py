"""Door to `deepspeed.zero.tiling`."""

from __future__ import annotations

from deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
