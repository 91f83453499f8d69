"""The CPU as an accelerator: no streams, no device memory of its own, gloo between processes.

Lives here: the answers for a host without a device; `NullStream` and `NullEvent`, which order nothing because every
operator has finished when its call returns. Built by `select`, which hands in the environment.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from deepspeed.accelerator.host_memory import HostMemory
from deepspeed.accelerator.interface import DeepSpeedAccelerator, DeviceIndex
from deepspeed.errors import AcceleratorError

__all__ = ["CpuAccelerator", "NullEvent", "NullStream"]


class NullStream:
    """The one queue of a device that has finished each operator when its call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None:
        """Nothing is queued, so nothing is waited for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is queued on the other stream either."""

    def wait_event(self, event: Any) -> None:
        """The event has happened when it was recorded."""

    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        """Return an event recorded now."""
        event = event or NullEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """True: all work is done."""
        return True


class NullEvent:
    """A moment of the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return: the event has happened."""

    def synchronize(self) -> None:
        """Return: the event has happened."""

    def query(self) -> bool:
        """True: the event has happened."""
        return True

    def elapsed_time(self, end_event: NullEvent) -> float:
        """Return the milliseconds from this event to `end_event`.

        Raises:
            AcceleratorError: one of the two was never recorded.
        """
        if self._seconds is None or end_event._seconds is None:
            raise AcceleratorError("elapsed_time needs two recorded events; call record() on both first.")
        return (end_event._seconds - self._seconds) * 1000


@functools.cache
def _half_matmul_runs() -> bool:
    """True when this build of torch multiplies float16 matrices on the CPU."""
    one = torch.ones(1, 1, dtype=torch.float16)
    try:
        return bool((one @ one).item() == 1)
    except RuntimeError:  # "addmm_impl_cpu_" not implemented for 'Half'
        return False


class CpuAccelerator(DeepSpeedAccelerator):
    """The host's processors. One "device" per local rank, so that counts and indexes work as with real devices."""

    _name = "cpu"

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Store where LOCAL_SIZE, LOCAL_WORLD_SIZE and LOCAL_RANK are read from: a live view, None for nowhere."""
        self._environ = environ if environ is not None else {}
        self._chosen_index: int | None = None
        self._memory = HostMemory()
        self._stream = NullStream()

    def is_available(self) -> bool:
        """True."""
        return True

    def is_synchronized_device(self) -> bool:
        """True."""
        return True

    def device(self, device_index: DeviceIndex = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext()

    def set_device(self, device_index: DeviceIndex) -> None:
        """Remember the index that `current_device` returns; torch knows one CPU only."""
        self._chosen_index = (
            device_index if isinstance(device_index, int) else torch.device(device_index or "cpu").index or 0
        )

    def current_device(self) -> int:
        """Return the index set last, else the local rank."""
        return self._chosen_index if self._chosen_index is not None else int(self._environ.get("LOCAL_RANK", 0))

    def device_name(self, device_index: int | None = None) -> str:
        """Return `"cpu"` for every index: a tensor's device never has one here, so `"cpu:1"` would equal none."""
        return self._name

    def device_count(self) -> int:
        """Return the number of ranks on this host when a launcher said it, else 1."""
        return int(self._environ.get("LOCAL_SIZE") or self._environ.get("LOCAL_WORLD_SIZE") or 1)

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        """Return: operators have finished when their calls return."""

    def communication_backend_name(self) -> str:
        """Return `"gloo"`, or `"ccl"` where Intel's bindings of it are installed."""
        return "ccl" if importlib.util.find_spec("oneccl_bindings_for_pytorch") else "gloo"

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        """Set the host generator."""
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        """Return the state of the host generator."""
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        """Seed the host generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the host generator: there is one."""
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed of the host generator."""
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the host generator."""
        return torch.default_generator

    @property
    def Stream(self) -> type[NullStream]:
        """`NullStream`."""
        return NullStream

    @property
    def Event(self) -> type[NullEvent]:
        """`NullEvent`."""
        return NullEvent

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext(stream)

    def current_stream(self, device_index: DeviceIndex = None) -> NullStream:
        """Return the one stream."""
        return self._stream

    def default_stream(self, device_index: DeviceIndex = None) -> NullStream:
        """Return the one stream."""
        return self._stream

    def empty_cache(self) -> None:
        """Return: torch keeps no cache of host memory."""

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the resident set of this process: torch does not count its host tensors."""
        return self._memory.resident_nbytes()

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Return the largest resident set since the last reset."""
        return self._memory.peak_nbytes()

    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return `memory_allocated`: there is no cache beyond it."""
        return self._memory.resident_nbytes()

    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Return `max_memory_allocated`."""
        return self._memory.peak_nbytes()

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        """Let the largest resident set start from now."""
        self._memory.reset_peak()

    def memory_stats(self, device_index: DeviceIndex = None) -> Mapping[str, Any]:
        """Return the two figures there are."""
        return {
            "allocated_bytes.all.current": self._memory.resident_nbytes(),
            "allocated_bytes.all.peak": self._memory.peak_nbytes(),
        }

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        """Return the host's memory."""
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        """Return what the host could give without swapping."""
        return int(psutil.virtual_memory().available)

    def is_bf16_supported(self) -> bool:
        """True: torch computes bfloat16 on every CPU."""
        return True

    def is_fp16_supported(self) -> bool:
        """True when this build of torch multiplies float16 matrices; slow on most CPUs."""
        return _half_matmul_runs()

    def _constructor(self, name: str, dtype: torch.dtype) -> Any:
        return getattr(torch, name)

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return the tensor itself: no device reads it by itself, so there is nothing to lock it for."""
        return tensor

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Return: nothing was locked."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether somebody else locked the tensor's memory."""
        return tensor.is_pinned()

    def pin_empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised host tensor."""
        return torch.empty(*size, dtype=dtype)

    def register_host_memory(self, tensor: torch.Tensor) -> bool:
        """Return False: there is no device to lock memory for."""
        return False

    def unregister_host_memory(self, tensor: torch.Tensor) -> bool:
        """Return False: nothing was locked."""
        return False
