"""Apple's devices under `torch.mps`: one per machine, one queue, the host's memory.

Lives here: what `torch.mps` calls otherwise or does not have. Not run on the machines this project is tested on; the
tests check it against a stand-in for the namespace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.accelerator.cpu import NullStream
from deepspeed.accelerator.interface import DeviceIndex
from deepspeed.accelerator.namespaced import NamespacedAccelerator

__all__ = ["MpsAccelerator"]


class MpsAccelerator(NamespacedAccelerator):
    """The one device of an Apple machine. Work is queued, in one order, so streams order nothing."""

    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        super().__init__("mps")
        self._largest_seen = 0

    def is_available(self) -> bool:
        """Ask `torch.backends.mps`."""
        return torch.backends.mps.is_available()

    def device(self, device_index: DeviceIndex = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that changes nothing: there is one device."""
        return contextlib.nullcontext()

    def set_device(self, device_index: DeviceIndex) -> None:
        """Return: there is one device."""

    def current_device(self) -> int:
        """Return 0."""
        return 0

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        """Block until the queue is empty."""
        self._torch.synchronize()

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        """Set the device's generator."""
        self._torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        """Return the state of the device's generator."""
        state: torch.Tensor = self._torch.get_rng_state()
        return state

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device."""
        self._torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the device's seed."""
        return self.default_generator(0).initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator."""
        generator: torch.Generator = self._torch._get_default_mps_generator()
        return generator

    @property
    def Stream(self) -> type[NullStream]:
        """`NullStream`: there is one queue."""
        return NullStream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext(stream)

    def current_stream(self, device_index: DeviceIndex = None) -> NullStream:
        """Return a name for the one queue."""
        return NullStream()

    def default_stream(self, device_index: DeviceIndex = None) -> NullStream:
        """Return a name for the one queue."""
        return NullStream()

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes of live tensors."""
        nbytes = int(self._torch.current_allocated_memory())
        self._largest_seen = max(self._largest_seen, nbytes)
        return nbytes

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the largest figure seen by `memory_allocated` since the reset: torch keeps no peak here."""
        self.memory_allocated()
        return self._largest_seen

    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes taken from the driver."""
        return int(self._torch.driver_allocated_memory())

    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return the larger of what is reserved now and the largest allocation seen."""
        return max(self.memory_reserved(), self.max_memory_allocated())

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        """Forget the largest figure seen."""
        self._largest_seen = 0

    def memory_stats(self, device_index: DeviceIndex = None) -> Mapping[str, Any]:
        """Return the two figures there are."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        """Return what the driver recommends as the most to use."""
        return int(self._torch.recommended_max_memory())

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        """Return the recommended most less what is allocated."""
        return self.total_memory() - self.memory_allocated()

    def is_fp64_supported(self) -> bool:
        """False."""
        return False

    def visible_devices_envs(self) -> list[str]:
        """Return nothing: there is one device."""
        return []
