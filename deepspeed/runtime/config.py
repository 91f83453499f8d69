"""Door to `deepspeed.config`."""

from __future__ import annotations

from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
