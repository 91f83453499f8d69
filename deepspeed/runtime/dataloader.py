"""Door to `deepspeed.data`."""

from __future__ import annotations

from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
