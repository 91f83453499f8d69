"""Where a saved input can rest between forward and backward: what all places share, and the device's own memory.

    put(flat) --> Rest      advance()   push on what is on its way out, without waiting
                            settle()    wait until nothing but the resting value itself takes memory
                            bring()     start the way back
                            value()     the value, in new memory of the device it came from; as often as it is asked

A rest gives up its place when the last reference to it goes: with the graph that saved the input, or right after the
backward of its segment.

Lives here: the protocols, `DevicePlace`. Other places: `host`, `disk`. Called by `keeping`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.activations.buffers import Buffers

__all__ = ["DevicePlace", "Place", "Rest"]


class Rest(Protocol):
    """One value at rest."""

    def advance(self) -> None:
        """Push on what is on its way out, without waiting."""

    def settle(self) -> None:
        """Block until the way out is done."""

    def bring(self) -> None:
        """Start the way back; does not wait for it."""

    def value(self) -> Tensor:
        """The value, 1-D, in new memory. Blocks the caller, or its stream."""


class Place(Protocol):
    """Takes values."""

    def accepts(self, tensor: Tensor, *, is_cut: bool) -> bool:
        """Whether moving this tensor here, or with `is_cut` this rank's shard of it, is what the settings ask for."""

    def put(self, flat: Tensor) -> Rest:
        """Let the values of `flat`, contiguous and 1-D, rest here; its memory is not needed after, in stream order."""


class DevicePlace:
    """Memory of the device: for shards, which are smaller than what they are cut from.

    Args:
        buffers: of the device.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def accepts(self, tensor: Tensor, *, is_cut: bool) -> bool:
        """Floating-point values of the device."""
        return tensor.is_floating_point() and get_accelerator().on_accelerator(tensor)

    def put(self, flat: Tensor) -> _InBuffer:
        """See `Place`."""
        return _InBuffer(self._buffers, flat)


class _InBuffer:
    def __init__(self, buffers: Buffers, flat: Tensor) -> None:
        self._buffers = buffers
        self._memory = buffers.take(flat.nbytes)
        self._values = self._memory.view(flat.dtype)
        self._values.copy_(flat)

    def advance(self) -> None:
        """Nothing is on its way."""

    def settle(self) -> None:
        """Nothing is on its way."""

    def bring(self) -> None:
        """It is there."""

    def value(self) -> Tensor:
        """A copy: the buffer may hold another value before the copy's last use."""
        return self._values.clone()

    def __del__(self) -> None:
        self._buffers.give_back(self._memory)
