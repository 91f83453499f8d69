"""Saved inputs in host memory: `cpu_checkpointing`, which is `offload.device: "cpu"`.

    device   tensor ------ lane ------> host buffer ------ lane ------> new tensor
                                        page-locked, used again

Where host and device are one place (the CPU) nothing is accepted, so nothing moves. Called by `keeping`.
"""

from __future__ import annotations

from torch import Tensor

from deepspeed.activations.buffers import Buffers
from deepspeed.activations.lane import Arrival, Lane
from deepspeed.offload import placement

__all__ = ["HostPlace"]


class HostPlace:
    """Host memory beside an accelerator's.

    Args:
        buffers: of the host.
        lane: carries values there and back.
    """

    def __init__(self, buffers: Buffers, lane: Lane) -> None:
        self._buffers = buffers
        self._lane = lane

    def accepts(self, tensor: Tensor, *, is_cut: bool) -> bool:
        """What is not in host memory already; a shard is smaller than what is there."""
        return is_cut or placement.is_host_apart(tensor.device)

    def put(self, flat: Tensor) -> _OnHost:
        """See `Place`."""
        return _OnHost(self._buffers, self._lane, flat)


class _OnHost:
    def __init__(self, buffers: Buffers, lane: Lane, flat: Tensor) -> None:
        self._buffers = buffers
        self._lane = lane
        self._device = flat.device
        self._memory = buffers.take(flat.nbytes)
        self._host = self._memory.view(flat.dtype)
        self._arrival: Arrival | None = None
        lane.out(self._host, flat)

    def advance(self) -> None:
        """The lane goes on by itself."""

    def settle(self) -> None:
        """The device's memory is free in stream order: nothing is to be waited for."""

    def bring(self) -> None:
        """See `Rest`."""
        if self._arrival is None:
            self._arrival = self._lane.back(self._host, self._device)

    def value(self) -> Tensor:
        """See `Rest`."""
        self.bring()
        arrival, self._arrival = self._arrival, None
        assert arrival is not None  # bring
        return arrival.wait()

    def __del__(self) -> None:
        self._buffers.give_back(self._memory)
