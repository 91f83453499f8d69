"""Door to the question whether a parameter is sharded."""

from __future__ import annotations

from deepspeed.zero.shard import is_sharded as is_zero_param

__all__ = ["is_zero_param"]
