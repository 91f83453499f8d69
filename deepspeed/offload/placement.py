"""Whether host memory is another place than the device's: on accelerators it is, on the CPU both are the same.

Where they are one place a host tier is memory like any other, and nothing is moved. Called by `engine.tiers`.
"""

from __future__ import annotations

import torch

__all__ = ["is_host_apart"]


def is_host_apart(device: torch.device) -> bool:
    """Whether tensors of `device` must be moved to be in host memory. Tests put another answer in its place."""
    return device.type != "cpu"
