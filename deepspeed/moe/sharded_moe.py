"""Door to gates and the layer that moves tokens, under the path of the original."""

from __future__ import annotations

from deepspeed.moe.dense import top1gating, top2gating, topkgating
from deepspeed.moe.gate import TopKGate
from deepspeed.moe.layer import MOELayer

__all__ = ["MOELayer", "TopKGate", "top1gating", "top2gating", "topkgating"]
