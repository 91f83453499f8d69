"""A number of the device that the host wants to know, without making it wait for the device.

    device   ... kernels ... | value | copy to page-locked memory | event
    host     launches all of that, goes on, and asks later: is_ready()? get()

On the CPU the number is there at once. Called by `zero.outcome`.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.accelerator.select import get_accelerator

__all__ = ["LateNumber"]


class LateNumber:
    """A 0-d tensor on its way to the host; `get` gives the same number every time.

    Args:
        value: 0-d; not written afterwards.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._event: Any = None
        if value.device.type == "cpu":
            self._host = value
            return
        accelerator = get_accelerator()
        self._host = accelerator.pin_memory(torch.empty((), dtype=value.dtype), make_copy=False)
        self._host.copy_(value, non_blocking=True)
        self._event = accelerator.Event()
        self._event.record()

    def is_ready(self) -> bool:
        """Whether `get` would return at once."""
        return self._event is None or bool(self._event.query())

    def get(self) -> float:
        """The number; blocks the host until the device has computed it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return float(self._host.view(1).tolist()[0])  # a read of host memory, where .item() would be a synchronisation
