"""Door to `deepspeed.common.logging`."""

from __future__ import annotations

from deepspeed.common.logging import log_dist, log_dist_once, logger, set_log_level_from_string

__all__ = ["log_dist", "log_dist_once", "logger", "set_log_level_from_string"]
