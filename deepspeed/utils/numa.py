"""Door to `deepspeed.launcher.numa`."""

from __future__ import annotations

from deepspeed.launcher.numa import get_numactl_cmd, parse_range_list

__all__ = ["get_numactl_cmd", "parse_range_list"]
