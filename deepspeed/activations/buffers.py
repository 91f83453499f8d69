"""Memory for inputs at rest: new each time, or made once and used again and again.

    FreshBuffers     take --> new memory                      give_back --> the allocator
    ReusedBuffers    take --> | used | used | free | free |   a block of `per_block` slots for each size; another when full

`contiguous_memory_optimization` is `ReusedBuffers` on the device with `number_checkpoints` slots: what rests for long
lies together, so that the allocator's free memory stays in one piece. Page-locked host memory is reused because making it
takes long.

Called by `host`, `disk` and `partition`'s place on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.common.logging import warn_once

__all__ = ["Buffers", "FreshBuffers", "ReusedBuffers", "device_bytes"]

_LINE_NBYTES = 64

MakeBytes = Callable[[int], Tensor]
"""Number of bytes -> so many, a 1-D uint8 tensor."""


class Buffers(Protocol):
    """Gives memory and takes it back. Any thread may call."""

    def take(self, nbytes: int) -> Tensor:
        """`nbytes` bytes, a 1-D uint8 tensor of undefined contents."""

    def give_back(self, memory: Tensor) -> None:
        """What `take` gave is not used any more."""


class FreshBuffers:
    """See `Buffers`."""

    def __init__(self, make: MakeBytes) -> None:
        self._make = make

    def take(self, nbytes: int) -> Tensor:
        """See `Buffers`."""
        return self._make(nbytes)

    def give_back(self, memory: Tensor) -> None:
        """The last reference frees it."""


class ReusedBuffers:
    """See `Buffers`.

    Args:
        make: makes a block.
        per_block: slots of a block.
        warns: say it when a second block of one size is made.
    """

    def __init__(self, make: MakeBytes, per_block: int = 1, *, warns: bool = False) -> None:
        self._make = make
        self._per_block = per_block
        self._warns = warns
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size; append and pop are atomic
        self._blocks: dict[int, int] = defaultdict(int)

    def take(self, nbytes: int) -> Tensor:
        """See `Buffers`."""
        free = self._free[nbytes]
        try:
            return free.pop()
        except IndexError:
            free.extend(self._block(nbytes))
            return free.pop()

    def give_back(self, memory: Tensor) -> None:
        """See `Buffers`."""
        self._free[memory.numel()].append(memory)

    def _block(self, nbytes: int) -> list[Tensor]:
        self._blocks[nbytes] += 1
        if self._warns and self._blocks[nbytes] > 1:
            warn_once(
                ("activations", "number_checkpoints"),
                "activation_checkpointing.number_checkpoints = %d, but more inputs of %d bytes are kept at once: another "
                "buffer of as many is made. Set it to the checkpointed parts that wait for backward at once (layers x "
                "micro-batches in flight), or call deepspeed.checkpointing.reset() after a forward without backward.",
                self._per_block,
                nbytes,
            )
        stride = -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES
        block = self._make(stride * self._per_block)
        return [block[slot * stride : slot * stride + nbytes] for slot in reversed(range(self._per_block))]


def device_bytes(nbytes: int) -> Tensor:
    """New memory of the current device."""
    return torch.empty(nbytes, dtype=torch.uint8, device=get_accelerator().current_device_name())
