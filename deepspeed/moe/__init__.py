"""Mixture of experts: layers of many experts, of which each token sees k, spread over ranks.

    layer (MoE) --> gating (which experts)  --> dispatch (rows to experts and back) --> experts (this rank's)
                                                 param_groups: which parameters are experts'
    auto_ep (experts of other libraries' models) --> dispatch --> stacked (this rank's)

Lives here: the layer, its routing and the marks of its parameters; modules load when first used. Does not live here: how
experts' gradients are averaged and saved (`engine`). The design: docs/adr/0016.
"""

from __future__ import annotations

from deepspeed.common.lazy import attach

_SUBMODULES = (
    "auto_ep",
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
    "stacked",
    "utils",
)

__all__ = [
    "auto_ep",
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
    "stacked",
    "utils",
]

__getattr__, __dir__ = attach(__name__, submodules=_SUBMODULES)
