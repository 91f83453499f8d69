"""Door to `deepspeed.accelerator.select`, under its old name."""

from __future__ import annotations

from deepspeed.accelerator.select import get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
