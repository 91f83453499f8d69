"""What the library asks of a device: one class, `DeepSpeedAccelerator`, that every kind of device fills in.

Lives here: the documented list of methods, with the answers that most devices share. Does not live here: any device
namespace of torch (`cpu`, `namespaced` and its children) and the choice among them (`select`).
Everyone reaches an instance through `get_accelerator()`.

Units: every memory figure is in bytes. A device index of None means the current device.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch

from deepspeed.errors import AcceleratorError, ArgumentError

__all__ = ["DeepSpeedAccelerator", "DeviceIndex", "TensorFactory"]

DeviceIndex: TypeAlias = "int | torch.device | str | None"


class TensorFactory:
    """Makes tensors of one dtype on one kind of device, called as `torch.LongTensor` is.

    Integers are sizes (`factory(2, 3)` is uninitialised, 2 x 3), anything else is data (`factory([1, 2])`).
    """

    def __init__(self, dtype: torch.dtype, device_name: str) -> None:
        self.dtype = dtype
        self.device_name = device_name

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Make one tensor from sizes or from data."""
        if len(arguments) == 1 and not isinstance(arguments[0], int):
            return torch.as_tensor(arguments[0], dtype=self.dtype, device=self.device_name)
        return torch.empty(arguments or (0,), dtype=self.dtype, device=self.device_name)


class DeepSpeedAccelerator(ABC):
    """One kind of device. Subclass it and hand an instance to `set_accelerator` to add another kind."""

    _name: str
    _communication_backend_name: str
    _compile_backend: str = "inductor"

    # ---------------------------------------------------------------- identity

    @abstractmethod
    def is_available(self) -> bool:
        """True when this process can use such a device; initialises nothing."""

    @abstractmethod
    def is_synchronized_device(self) -> bool:
        """True when an operator has finished when its call returns (no streams)."""

    def use_host_timers(self) -> bool:
        """True when the host's clock times work correctly, so device events are not needed."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """True when the device orders operators by their data, so that streams need no waiting on each other."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """True when allocation waits for memory in use by queued work instead of failing."""
        return self.is_synchronized_device()

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name that torch gives the kind of device (`"cuda"`), or one of them (`"cuda:1"`)."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def product_name(self, device_index: DeviceIndex = None) -> str:
        """Return what the maker calls the device (`"NVIDIA H200"`); empty where torch does not tell."""
        return ""

    @abstractmethod
    def device(self, device_index: DeviceIndex = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which `device_index` is the current device."""

    @abstractmethod
    def set_device(self, device_index: DeviceIndex) -> None:
        """Make a device the current one of this process."""

    @abstractmethod
    def current_device(self) -> int:
        """Return the index of the current device."""

    def current_device_name(self) -> str:
        """Return the current device as torch spells it, `"cuda:1"`."""
        return self.device_name(self.current_device())

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices this process sees."""

    @abstractmethod
    def synchronize(self, device_index: DeviceIndex = None) -> None:
        """Block until all work queued on the device is done."""

    def communication_backend_name(self) -> str:
        """Return the back end of `torch.distributed` that moves this device's tensors."""
        return self._communication_backend_name

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True when the tensor lies on this kind of device."""
        return tensor.device.type == self._name

    # ---------------------------------------------------------------- random numbers

    def random(self) -> ModuleType:
        """Return the `torch.random` module."""
        return torch.random

    @abstractmethod
    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        """Set the generator of a device to a state from `get_rng_state`."""

    @abstractmethod
    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        """Return the state of a device's generator: a 1-D uint8 tensor on the host."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices that this process sees."""

    @abstractmethod
    def initial_seed(self) -> int:
        """Return the seed that the current device's generator was started with."""

    @abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator:
        """Return a device's generator."""

    # ---------------------------------------------------------------- streams and events

    @property
    @abstractmethod
    def Stream(self) -> Any:
        """The class of streams."""

    @property
    @abstractmethod
    def Event(self) -> Any:
        """The class of events; `elapsed_time` is in milliseconds."""

    @abstractmethod
    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context that queues work on `stream`; None changes nothing."""

    @abstractmethod
    def current_stream(self, device_index: DeviceIndex = None) -> Any:
        """Return the stream that work goes to now."""

    @abstractmethod
    def default_stream(self, device_index: DeviceIndex = None) -> Any:
        """Return the stream that work goes to when none is chosen."""

    # ---------------------------------------------------------------- memory

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that torch holds but no tensor uses back to the device."""

    @abstractmethod
    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes that tensors hold now."""

    @abstractmethod
    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the largest `memory_allocated` since the last reset."""

    @abstractmethod
    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes that torch has taken from the device, tensors and cache."""

    @abstractmethod
    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return the largest `memory_reserved` since the last reset."""

    @abstractmethod
    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        """Start the `max_*` figures afresh."""

    @abstractmethod
    def memory_stats(self, device_index: DeviceIndex = None) -> Mapping[str, Any]:
        """Return the allocator's own figures, by the keys of `torch.cuda.memory_stats` as far as they apply."""

    @abstractmethod
    def total_memory(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes that the device has."""

    @abstractmethod
    def available_memory(self, device_index: DeviceIndex = None) -> int:
        """Return the bytes that this process could still get."""

    def reset_max_memory_allocated(self, device_index: DeviceIndex = None) -> None:
        """Same as `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: DeviceIndex = None) -> None:
        """Same as `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: DeviceIndex = None) -> int:
        """Return `memory_reserved` under its older name."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: DeviceIndex = None) -> int:
        """Return `max_memory_reserved` under its older name."""
        return self.max_memory_reserved(device_index)

    # ---------------------------------------------------------------- dtypes

    @abstractmethod
    def is_bf16_supported(self) -> bool:
        """True when bfloat16 arithmetic works on this device."""

    @abstractmethod
    def is_fp16_supported(self) -> bool:
        """True when float16 arithmetic works on this device."""

    def is_fp64_supported(self) -> bool:
        """True when float64 arithmetic works on this device."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes that models may train in, float32 first."""
        answers = {
            torch.float32: True,
            torch.float16: self.is_fp16_supported(),
            torch.bfloat16: self.is_bf16_supported(),
            torch.float64: self.is_fp64_supported(),
        }
        return [dtype for dtype, is_supported in answers.items() if is_supported]

    def is_triton_supported(self) -> bool:
        """True when Triton kernels run on this device."""
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """True when a Triton kernel should serve grouped matrix products in place of torch's."""
        return False

    # ---------------------------------------------------------------- tensor constructors

    def _constructor(self, name: str, dtype: torch.dtype) -> Any:
        """Return the constructor behind a property such as `LongTensor`; `name` is that property."""
        return TensorFactory(dtype, self._name)

    @property
    def BFloat16Tensor(self) -> Any:
        """Constructor of bfloat16 tensors on this device, called as `torch.BFloat16Tensor` is."""
        return self._constructor("BFloat16Tensor", torch.bfloat16)

    @property
    def ByteTensor(self) -> Any:
        """Constructor of uint8 tensors on this device."""
        return self._constructor("ByteTensor", torch.uint8)

    @property
    def DoubleTensor(self) -> Any:
        """Constructor of float64 tensors on this device."""
        return self._constructor("DoubleTensor", torch.float64)

    @property
    def FloatTensor(self) -> Any:
        """Constructor of float32 tensors on this device."""
        return self._constructor("FloatTensor", torch.float32)

    @property
    def HalfTensor(self) -> Any:
        """Constructor of float16 tensors on this device."""
        return self._constructor("HalfTensor", torch.float16)

    @property
    def IntTensor(self) -> Any:
        """Constructor of int32 tensors on this device."""
        return self._constructor("IntTensor", torch.int32)

    @property
    def LongTensor(self) -> Any:
        """Constructor of int64 tensors on this device."""
        return self._constructor("LongTensor", torch.int64)

    # ---------------------------------------------------------------- pinned host memory

    @abstractmethod
    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return the host tensor's content in page-locked memory.

        Args:
            tensor: a host tensor.
            make_copy: True copies into new page-locked memory; False locks the tensor's own memory and returns it.
            match_shape: False may return a flat copy (1-D, same elements in order).
        """

    @abstractmethod
    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Undo `pin_memory(..., make_copy=False)`; memory that was allocated page-locked is freed with its tensor."""

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True when the tensor lies in page-locked memory."""

    @abstractmethod
    def pin_empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised host tensor, page-locked where the device can."""

    def pin_empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised, page-locked host tensor of the same shape and dtype."""
        return self.pin_empty(*tensor.shape, dtype=tensor.dtype)

    def pin_memory_alignment(self) -> int:
        """Return the bytes that the length of page-locked memory must be a multiple of."""
        return 1

    @abstractmethod
    def register_host_memory(self, tensor: torch.Tensor) -> bool:
        """Lock the pages under a contiguous host tensor in place; False when this device cannot."""

    @abstractmethod
    def unregister_host_memory(self, tensor: torch.Tensor) -> bool:
        """Unlock pages locked by `register_host_memory`; False when there was nothing to do."""

    # ---------------------------------------------------------------- graphs

    def create_graph(self) -> Any:
        """Return an empty graph to capture work into.

        Raises:
            AcceleratorError: this device has no graphs. Running eagerly instead is the caller's decision: replaying a
                graph that captured nothing would silently compute nothing.
        """
        raise AcceleratorError(
            f"the accelerator {self._name!r} has no graphs to capture work into. "
            "Run without them (leave enable_cuda_graph out of the config)."
        )

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that records work into `graph` instead of running it."""
        return self.create_graph()  # type: ignore[no-any-return]  # raises

    def replay_graph(self, graph: Any) -> None:
        """Run the work that `graph` recorded."""
        self.create_graph()

    def is_current_stream_capturing(self) -> bool:
        """True inside `capture_to_graph`."""
        return False

    # ---------------------------------------------------------------- profiling ranges and start-up calls

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named range in the device's profiler; nothing where there is none."""

    def range_pop(self) -> None:
        """Close the range opened last."""

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call `callback` once the device is initialised: at once where there is nothing to initialise."""
        callback()

    # ---------------------------------------------------------------- native ops

    def op_builder_dir(self) -> str:
        """Return the module that describes the native ops."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """Return the builder class of a native op, for example `"CPUAdamBuilder"`.

        Raises:
            AcceleratorError: there is no such builder.
        """
        builders = importlib.import_module(self.op_builder_dir())
        builder = getattr(builders, class_name, None)
        if builder is None:
            known = sorted(name for name in dir(builders) if name.endswith("Builder"))
            raise AcceleratorError(f"there is no op builder {class_name!r}; {self.op_builder_dir()} has {known}.")
        return builder

    def create_op_builder(self, class_name: str) -> Any:
        """Return a new builder of a native op; errors as `get_op_builder`."""
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        """Return torch's `BuildExtension` command class for setuptools."""
        return importlib.import_module("torch.utils.cpp_extension").BuildExtension

    # ---------------------------------------------------------------- environment for child processes

    def export_envs(self) -> list[str]:
        """Return prefixes of the environment variables that a launcher passes to other hosts."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the variables that limit which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        """Write the device list into an environment for child processes."""
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))

    # ---------------------------------------------------------------- torch.compile

    def get_compile_backend(self) -> str:
        """Return the `torch.compile` back end to use on this device."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the `torch.compile` back end.

        Raises:
            ArgumentError: torch has no back end of that name.
        """
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ArgumentError(f"compile back end {backend!r} is unknown; torch has {sorted(known)}.")
        self._compile_backend = backend
