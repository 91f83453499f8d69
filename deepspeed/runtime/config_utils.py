"""Door to `deepspeed.config.base`."""

from __future__ import annotations

from deepspeed.config.base import ConfigModel as DeepSpeedConfigModel

__all__ = ["DeepSpeedConfigModel"]
