"""Doors only: logging, timers, groups and small helpers under their published names. Nothing inside imports it."""

from __future__ import annotations

from deepspeed.common.lazy import attach

_SUBMODULES = ("groups", "logging", "numa", "timer")
_NAMES = {
    "RepeatingLoader": "deepspeed.data:RepeatingLoader",
    "get_numactl_cmd": "deepspeed.launcher.numa:get_numactl_cmd",
    "log_dist": "deepspeed.common.logging:log_dist",
    "log_dist_once": "deepspeed.common.logging:log_dist_once",
    "logger": "deepspeed.common.logging:logger",
    "set_log_level_from_string": "deepspeed.common.logging:set_log_level_from_string",
}

__all__ = [*_SUBMODULES, *_NAMES]

__getattr__, __dir__ = attach(__name__, submodules=_SUBMODULES, names=_NAMES)
