"""Gradients added up in host memory, where that is another place than the device's.

    stages 2, 3    bucket --reduce-scatter--> | mean, staged | --> host shard          HostScatterer, inside the store
                   next micro-batch:          | host shard   | --> staged, += mean --> host shard
    stage 1        whole buffer on the device; own shard --> host after the reduction  HostShards, around the store

The additions are made on the device, in the order and precision in which they are made without a tier; the host only keeps
the sum, so the device needs no memory for it. Copies are queued behind the reductions, while backward goes on; `HostShards`
waits for them when somebody looks.

Does not live here: reductions (`comm`), the stores (`zero.gradients`). `engine.partition` puts them together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.algorithms import FlatReduceScatterer, ShardWork
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.gradient_store import GradientStore

__all__ = ["HostScatterer", "HostShards"]


class _Landed:
    """A reduce-scatter whose result goes on to the host."""

    def __init__(self, work: ShardWork, staged: Tensor, into: Tensor) -> None:
        self._work = work
        self._staged: Tensor | None = staged
        self._into = into

    def wait(self) -> None:
        """Block until the result is there, and queue its copy to the host; the copy is not waited for."""
        self._work.wait()
        if self._staged is not None:
            self._into.copy_(self._staged, non_blocking=True)
            self._staged = None

    def wait_free(self) -> None:
        """See `ShardWork`."""
        self.wait()
        self._work.wait_free()


class HostScatterer:
    """A `FlatReduceScatterer` that is given places in host memory for its results.

    Args:
        inner: reduces on the device.
        device: where.
    """

    def __init__(self, inner: FlatReduceScatterer, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    @property
    def buffer(self) -> Tensor:
        """See `FlatReduceScatterer`."""
        return self._inner.buffer

    def launch(self, start: int, stop: int, into: Tensor | None = None, *, accumulate: bool = False) -> ShardWork:
        """See `FlatReduceScatterer`; `into` is on the host."""
        assert into is not None  # stages 2 and 3 say where
        staged = torch.empty(into.shape, dtype=into.dtype, device=self._device)
        if accumulate:
            staged.copy_(into, non_blocking=True)
        return _Landed(self._inner.launch(start, stop, staged, accumulate=accumulate), staged, into)

    def close(self) -> None:
        """See `FlatReduceScatterer`."""
        self._inner.close()


class HostShards:
    """A `GradientStore` whose shards are in host memory.

    Args:
        flat: whose gradients they are.
        inner: collects and reduces.
        memory: of the host, for this rank's shard; None: the inner store's shards are there already.
    """

    def __init__(self, flat: FlatGroup, inner: GradientStore, memory: Tensor | None) -> None:
        self._flat = flat
        self._inner = inner
        self._memory_S = memory
        self._is_moving = False
        self.reduces_every_backward = inner.reduces_every_backward
        self.keeps_param_grads = inner.keeps_param_grads
        self.spends_with_zeros = inner.spends_with_zeros

    @property
    def dtype(self) -> torch.dtype:
        """See `GradientStore`."""
        return self._inner.dtype

    def collect(self, number: int) -> Tensor:
        """See `GradientStore`."""
        return self._inner.collect(number)

    def launch(self, number: int) -> None:
        """See `GradientStore`."""
        self._inner.launch(number)

    def wait(self, number: int) -> None:
        """See `GradientStore`."""
        self._inner.wait(number)
        self._is_moving = True
        if self._memory_S is not None:
            start, stop = self._flat.layout.shard_range(self._flat.layout.buckets[number])
            self._memory_S[start:stop].copy_(self._inner.shard(start, stop), non_blocking=True)

    def shard(self, start: int, stop: int) -> Tensor:
        """See `GradientStore`. Waits for what moves."""
        self._settle()
        return self._inner.shard(start, stop) if self._memory_S is None else self._memory_S[start:stop]

    def shards(self) -> list[Tensor]:
        """See `GradientStore`. Waits for what moves."""
        self._settle()
        inner = self._inner.shards()  # zeroes what nothing has filled
        if self._memory_S is None:
            return inner
        return [self._memory_S[extent.start : extent.stop] for extent in self._flat.extents]  # cut alike: one order of sums

    def buffers(self) -> list[Tensor]:
        """See `GradientStore`."""
        return self._inner.buffers()

    def holds(self, number: int) -> bool:
        """See `GradientStore`."""
        return self._inner.holds(number)

    def spend(self, start: int, stop: int) -> None:
        """See `GradientStore`."""
        self._inner.spend(start, stop)

    def close_window(self) -> None:
        """See `GradientStore`."""
        self._inner.close_window()

    def drop(self) -> None:
        """See `GradientStore`."""
        self._inner.drop()

    def close(self) -> None:
        """See `GradientStore`."""
        self._inner.close()

    def _settle(self) -> None:
        if self._is_moving:
            get_accelerator().synchronize()
            self._is_moving = False
