"""Devices behind one interface: `get_accelerator()` returns what this process computes on.

Only this room uses a device namespace of torch (`torch.cuda`, ...).
"""

from __future__ import annotations

from deepspeed.accelerator.interface import DeepSpeedAccelerator
from deepspeed.accelerator.select import get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
