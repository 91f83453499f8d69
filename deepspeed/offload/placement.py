"""Whether host memory is another place than the device's: on accelerators it is, on the CPU both are the same.

Where they are one place a host tier is memory like any other, and nothing is moved. Called by `engine.tiers`, and by the
plan, which knows a kind of device and needs no torch to ask.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Device", "is_host_apart"]


class Device(Protocol):
    """What is asked of a `torch.device`."""

    @property
    def type(self) -> str:
        """Its kind, such as "cuda"."""


def is_host_apart(device: Device) -> bool:
    """Whether tensors of `device` must be moved to be in host memory. Tests put another answer in its place."""
    return device.type != "cpu"
