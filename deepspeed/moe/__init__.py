"""Mixture of experts: layers of many experts, of which each token sees k, spread over ranks.

    layer (MoE) --> gating (which experts)  --> dispatch (rows to experts and back) --> experts (this rank's)
                                                 param_groups: which parameters are experts'

Lives here: the layer, its routing and the marks of its parameters; modules load when first used. Does not live here: how
experts' gradients are averaged and saved (`engine`). The design: docs/adr/0016.
"""

from __future__ import annotations

from deepspeed.common.lazy import attach

_SUBMODULES = (
    "dense",
    "dispatch",
    "experts",
    "gate",
    "gating",
    "layer",
    "mappings",
    "noise",
    "param_groups",
    "sharded_moe",
    "utils",
)

__all__ = [
    "dense",
    "dispatch",
    "experts",
    "gate",
    "gating",
    "layer",
    "mappings",
    "noise",
    "param_groups",
    "sharded_moe",
    "utils",
]

__getattr__, __dir__ = attach(__name__, submodules=_SUBMODULES)
