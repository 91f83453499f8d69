"""Doors only: logging, timers, groups and small helpers under their published names. Nothing inside imports it."""

from __future__ import annotations

from deepspeed.common.lazy import attach

_SUBMODULES = ("groups", "logging", "numa", "tensor_fragment", "timer", "z3_leaf_module", "zero_to_fp32", "zero_to_torch")
_NAMES = {
    "OnDevice": "deepspeed.common.on_device:OnDevice",
    "RepeatingLoader": "deepspeed.data:RepeatingLoader",
    **{
        name: f"deepspeed.zero.leaf:{name}"
        for name in (
            "get_z3_leaf_modules",
            "set_z3_leaf_module",
            "set_z3_leaf_modules",
            "set_z3_leaf_modules_by_name",
            "set_z3_leaf_modules_by_suffix",
            "unset_z3_leaf_modules",
            "z3_leaf_parameter",
        )
    },
    "get_numactl_cmd": "deepspeed.launcher.numa:get_numactl_cmd",
    "log_dist": "deepspeed.common.logging:log_dist",
    "log_dist_once": "deepspeed.common.logging:log_dist_once",
    "logger": "deepspeed.common.logging:logger",
    **{
        name: f"deepspeed.zero.access:{name}"
        for name in (
            "safe_get_full_fp32_param",
            "safe_get_full_grad",
            "safe_get_full_optimizer_state",
            "safe_get_local_fp32_param",
            "safe_get_local_grad",
            "safe_get_local_optimizer_state",
            "safe_set_full_fp32_param",
            "safe_set_full_grad",
            "safe_set_full_optimizer_state",
            "safe_set_local_fp32_param",
            "safe_set_local_grad",
            "safe_set_local_optimizer_state",
            "safe_update_full_grad_vectorized",
        )
    },
    "set_log_level_from_string": "deepspeed.common.logging:set_log_level_from_string",
}

__all__ = [*_SUBMODULES, *_NAMES]

__getattr__, __dir__ = attach(__name__, submodules=_SUBMODULES, names=_NAMES)
