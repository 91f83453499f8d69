"""Door to `deepspeed.data.loader`."""

from __future__ import annotations

from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
