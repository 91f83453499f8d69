"""Copies between the device and host memory beside the computation: a side stream of whatever accelerator there is.

    computation   | segment 1 | segment 2 | segment 3 |          | backward 3 | backward 2 |
    lane                 | 1 out     | 2 out     |               | 2 back     | 1 back     |

The lane is one stream, so a host buffer may be used again as soon as a copy from it is queued. Devices without streams
(the CPU) have null streams: each copy is over when the call returns.

Called by `host` and `disk`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator

__all__ = ["Arrival", "Lane"]


class Arrival(NamedTuple):
    """A tensor of the device that is on its way there."""

    tensor: Tensor
    event: Any

    def wait(self) -> Tensor:
        """The tensor, for the current stream's next operators."""
        stream = get_accelerator().current_stream()
        stream.wait_event(self.event)
        _keep_for(self.tensor, stream)
        return self.tensor


class Lane:
    """One side stream of the current device."""

    def __init__(self) -> None:
        self._stream = get_accelerator().Stream()

    def out(self, host: Tensor, flat: Tensor) -> Any:
        """Queue the copy of `flat` to `host`, after all that the current stream was asked to; the event of its end."""
        accelerator = get_accelerator()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            host.copy_(flat, non_blocking=True)
        _keep_for(flat, self._stream)
        return self._stream.record_event()

    def back(self, host: Tensor, device: torch.device) -> Arrival:
        """Queue the copy of `host` into new memory of `device`."""
        with get_accelerator().stream(self._stream):
            tensor = torch.empty_like(host, device=device)
            tensor.copy_(host, non_blocking=True)
        return Arrival(tensor, self._stream.record_event())


def _keep_for(tensor: Tensor, stream: Any) -> None:
    """Do not let the allocator of a device give the memory to others before `stream` is done with it."""
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)
