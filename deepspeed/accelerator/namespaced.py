"""A device whose torch namespace has the shape of `torch.cuda`: one class that passes each question on.

Lives here: `NamespacedAccelerator`, parent of `cuda.CudaAccelerator` and `others.OtherAccelerator`. The namespace is
looked up when first used, so that importing this module touches no device.

Does not live here: how devices differ (`cuda`, `others`, `mps`). Their instances are built by `select`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed.accelerator.interface import DeepSpeedAccelerator, DeviceIndex, TensorFactory
from deepspeed.errors import AcceleratorError

__all__ = ["NamespacedAccelerator"]


class NamespacedAccelerator(DeepSpeedAccelerator):
    """A kind of device served by `torch.<name>`, which a plug-in may have to add first."""

    plugin: str | None = None
    """Module whose import adds `torch.<name>`; None when torch brings it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: Any = None

    @property
    def _torch(self) -> Any:
        """The namespace `torch.<name>`; errors when the plug-in that brings it is missing."""
        if self._loaded is None:
            if self.plugin is not None:
                if importlib.util.find_spec(self.plugin.partition(".")[0]) is None:
                    raise AcceleratorError(
                        f"the accelerator {self._name!r} needs the Python package {self.plugin!r}, which is not installed. "
                        f"Install it from the vendor of the device, or set DS_ACCELERATOR to another one."
                    )
                importlib.import_module(self.plugin)
            self._loaded = getattr(torch, self._name, None)
            if self._loaded is None:
                raise AcceleratorError(
                    f"torch {torch.__version__} has no torch.{self._name}. "
                    f"Install a build of torch with {self._name} support, or set DS_ACCELERATOR to another accelerator."
                )
        return self._loaded

    def _ask(self, name: str, default: Any, *arguments: Any) -> Any:
        """Call a function of the namespace that not every plug-in has; `default` is the answer where it is missing."""
        function = getattr(self._torch, name, None)
        return default if function is None else function(*arguments)

    def is_available(self) -> bool:
        """True when the plug-in is installed and it sees a device."""
        if self.plugin is not None and importlib.util.find_spec(self.plugin.partition(".")[0]) is None:
            return False
        return getattr(torch, self._name, None) is not None and bool(self._torch.is_available())

    def is_synchronized_device(self) -> bool:
        """False: work is queued on streams."""
        return False

    def product_name(self, device_index: DeviceIndex = None) -> str:
        """Return what the device's driver calls it."""
        return str(self._ask("get_device_name", "", device_index))

    def device(self, device_index: DeviceIndex = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which `device_index` is current."""
        return self._torch.device(device_index)  # type: ignore[no-any-return]

    def set_device(self, device_index: DeviceIndex) -> None:
        """Make a device the current one."""
        self._torch.set_device(device_index)

    def current_device(self) -> int:
        """Return the current device's index."""
        return int(self._torch.current_device())

    def device_count(self) -> int:
        """Return the number of visible devices."""
        return int(self._torch.device_count())

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        """Block until the device's queues are empty."""
        self._torch.synchronize(device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        """Set a device's generator."""
        self._torch.set_rng_state(new_state, self._current_if_none(device_index))

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        """Return the state of a device's generator."""
        state: torch.Tensor = self._torch.get_rng_state(self._current_if_none(device_index))
        return state

    def _current_if_none(self, device_index: DeviceIndex) -> DeviceIndex:
        return self.current_device() if device_index is None else device_index

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        self._torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device."""
        self._torch.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """Return the current device's seed."""
        return int(self._torch.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return a device's generator."""
        generator: torch.Generator = self._torch.default_generators[device_index]
        return generator

    @property
    def Stream(self) -> Any:
        """The namespace's stream class."""
        return self._torch.Stream

    @property
    def Event(self) -> Any:
        """The namespace's event class."""
        return self._torch.Event

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context that queues work on `stream`."""
        return self._torch.stream(stream)  # type: ignore[no-any-return]

    def current_stream(self, device_index: DeviceIndex = None) -> Any:
        """Return the current stream."""
        return self._torch.current_stream(device_index)

    def default_stream(self, device_index: DeviceIndex = None) -> Any:
        """Return the default stream, or the current one where the plug-in names no default."""
        if hasattr(self._torch, "default_stream"):
            return self._torch.default_stream(device_index)
        return self._torch.current_stream(device_index)

    def empty_cache(self) -> None:
        """Give cached memory back."""
        self._ask("empty_cache", None)

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes of live tensors."""
        return int(self._torch.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the peak of live tensors."""
        return int(self._torch.max_memory_allocated(device_index))

    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes taken from the device."""
        return int(self._torch.memory_reserved(device_index))

    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return the peak taken from the device."""
        return int(self._torch.max_memory_reserved(device_index))

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        """Start the peaks afresh."""
        self._torch.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: DeviceIndex = None) -> Mapping[str, Any]:
        """Return the allocator's figures."""
        stats: Mapping[str, Any] = self._torch.memory_stats(device_index)
        return stats

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        """Return the device's memory."""
        return int(self._torch.get_device_properties(self._current_if_none(device_index)).total_memory)

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        """Return what the driver has free plus what torch caches without using it."""
        free_nbytes, _ = self._torch.mem_get_info(self._current_if_none(device_index))
        cached_nbytes = self.memory_reserved(device_index) - self.memory_allocated(device_index)
        return int(free_nbytes) + cached_nbytes

    def is_bf16_supported(self) -> bool:
        """Ask the namespace; a plug-in that does not say is taken to support it."""
        return bool(self._ask("is_bf16_supported", True))

    def is_fp16_supported(self) -> bool:
        """True."""
        return True

    def _constructor(self, name: str, dtype: torch.dtype) -> Any:
        return getattr(self._torch, name, None) or TensorFactory(dtype, self._name)

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return a page-locked copy, or the tensor itself with its pages locked (`make_copy=False`)."""
        if make_copy:
            return tensor.pin_memory()
        if not self.is_pinned(tensor) and not self.register_host_memory(tensor):
            raise AcceleratorError(
                f"the accelerator {self._name!r} cannot lock memory that is allocated already; "
                "use pin_memory(tensor, make_copy=True)."
            )
        return tensor

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Unlock what `pin_memory(make_copy=False)` locked."""
        self.unregister_host_memory(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True when the tensor's memory is page-locked."""
        return tensor.is_pinned()

    def pin_empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised, page-locked host tensor."""
        return torch.empty(*size, dtype=dtype, pin_memory=True)

    def register_host_memory(self, tensor: torch.Tensor) -> bool:
        """Return False: the namespace offers no way to lock existing memory."""
        return False

    def unregister_host_memory(self, tensor: torch.Tensor) -> bool:
        """Return False: nothing was locked."""
        return False

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Queue `callback` for the device's initialisation, or call it at once where the plug-in has no queue."""
        queue = getattr(self._torch, "_lazy_call", None)
        if queue is None:
            callback()
        else:
            queue(callback)
