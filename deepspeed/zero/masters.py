"""The full-precision values that an optimizer updates, in shard space, wherever they rest.

    MemoryMasters   one tensor, on the device or in host memory; ranges are views of it
    FileMasters     a file of a tier; ranges are read and written, and the walk brings whole sub-groups (`zero.residence`)

    read      the values of a range: a view, or a copy
    write     replace them
    editing   change them in place: written back at the end where the tensor was a copy

Lives here: access by range. Does not live here: where parameters lie in shard space (`zero.flat`, which has one of these
unless its values are their own masters), the choice (`engine.partition`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.common.deferred import DeferredTensor
from deepspeed.errors import UsageError
from deepspeed.offload.tier_file import TierFile, read_new

__all__ = ["FileMasters", "Masters", "MemoryMasters"]

_BLOCK_NUMEL = 1 << 22  # of a file, in memory at a time


class Masters(Protocol):
    """Masters of one flat group; ranges are of shard space, tensors 1-D."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""

    @property
    def device(self) -> torch.device:
        """Where the values are stepped."""

    @property
    def is_on_disk(self) -> bool:
        """Whether a call can meet an error of a file."""

    @property
    def is_apart(self) -> bool:
        """Whether the model's values are other memory than that of the steps: those must be delivered."""

    def slot(self, start: int, stop: int) -> Tensor:
        """What the walk steps: a view, or zeros without memory of their own, whose `.data` a residence sets."""

    def view(self, start: int, stop: int) -> Tensor:
        """A view; only where masters are in memory."""

    def read(self, start: int, stop: int) -> Tensor:
        """A view where they are in memory, else a copy."""

    def deferred(self, start: int, stop: int) -> Tensor | DeferredTensor:
        """A view where they are in memory, else what reads them when it is asked."""

    def write(self, start: int, values: Tensor) -> None:
        """Let the range from `start` on be `values`, of any dtype and device."""

    def editing(self, start: int, stop: int, *, reads: bool = True) -> AbstractContextManager[Tensor]:
        """Change the range inside. `reads` False: all of it is overwritten, so what it gives is undefined."""

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The range in parts that are small enough to be in memory one at a time."""

    def restore(self) -> None:
        """All of them are about to be written anew: make good what was lost of their place."""

    def buffers(self) -> list[Tensor]:
        """All memory that they keep."""

    def close(self) -> None:
        """Let go of them."""


class MemoryMasters:
    """Masters in one tensor, zeros at first.

    Args:
        memory: 1-D, one element for each of shard space.
        is_apart: see `Masters`.
    """

    is_on_disk = False

    def __init__(self, memory: Tensor, *, is_apart: bool = False) -> None:
        self._memory_S = memory
        self.is_apart = is_apart

    @property
    def dtype(self) -> torch.dtype:
        """See `Masters`."""
        return self._memory_S.dtype

    @property
    def device(self) -> torch.device:
        """See `Masters`."""
        return self._memory_S.device

    def slot(self, start: int, stop: int) -> Tensor:
        """See `Masters`."""
        return self._memory_S[start:stop]

    view = slot
    read = slot
    deferred = slot

    def write(self, start: int, values: Tensor) -> None:
        """See `Masters`."""
        self._memory_S[start : start + values.numel()].copy_(values)

    @contextmanager
    def editing(self, start: int, stop: int, *, reads: bool = True) -> Iterator[Tensor]:
        """See `Masters`."""
        yield self._memory_S[start:stop]

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """See `Masters`: the range itself."""
        yield start, stop

    def restore(self) -> None:
        """See `Masters`."""

    def buffers(self) -> list[Tensor]:
        """See `Masters`."""
        return [self._memory_S]

    def close(self) -> None:
        """See `Masters`."""


class FileMasters:
    """Masters in a file that holds nothing else.

    Args:
        file: at least `dtype.itemsize` bytes for each element of shard space, zeros at first.
        dtype: of the values.
        is_apart: see `Masters`.
    """

    is_on_disk = True

    def __init__(self, file: TierFile, dtype: torch.dtype, *, is_apart: bool = False) -> None:
        self.file = file
        self.is_apart = is_apart
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """See `Masters`."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """See `Masters`."""
        return torch.device("cpu")

    def slot(self, start: int, stop: int) -> Tensor:
        """See `Masters`."""
        return torch.zeros((), dtype=self._dtype).expand(stop - start)

    def view(self, start: int, stop: int) -> Tensor:
        """Refuse: there is no memory to view."""
        raise UsageError(
            f"elements {start} to {stop} of full-precision values were asked for in memory, but they rest in "
            f"{self.file.file.path}. Use read() or editing()."
        )

    def read(self, start: int, stop: int) -> Tensor:
        """See `Masters`."""
        return read_new(self.file, start * self._dtype.itemsize, stop - start, self._dtype)

    def deferred(self, start: int, stop: int) -> DeferredTensor:
        """See `Masters`."""
        return DeferredTensor(stop - start, self._dtype, lambda: self.read(start, stop))

    def write(self, start: int, values: Tensor) -> None:
        """See `Masters`."""
        own = values.detach().to(device="cpu", dtype=self._dtype).contiguous()
        self.file.write(start * self._dtype.itemsize, own)

    @contextmanager
    def editing(self, start: int, stop: int, *, reads: bool = True) -> Iterator[Tensor]:
        """See `Masters`."""
        values = self.read(start, stop) if reads else torch.empty(stop - start, dtype=self._dtype)
        yield values
        self.write(start, values)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """See `Masters`."""
        for begin in range(start, stop, _BLOCK_NUMEL):
            yield begin, min(begin + _BLOCK_NUMEL, stop)

    def restore(self) -> None:
        """See `Masters`."""
        self.file.restore()

    def buffers(self) -> list[Tensor]:
        """See `Masters`."""
        return []

    def close(self) -> None:
        """See `Masters`."""
        self.file.close()
