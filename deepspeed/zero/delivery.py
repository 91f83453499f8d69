"""Rounded values on their way from the host, where they are stepped, to where the model's values rest.

    batch 0    step --> | staging a | --> device
    batch 1               step --> | staging b | --> device        while a is copied
    batch 2    step --> | staging a |  ...                         when a is free again

A slice whose values rest elsewhere has `values` without memory; it is lent some for the time of its step, and the optimizer
writes there as it writes anywhere. Called by residences (`zero.residence`, `zero.disk_residence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.aio.engine import aligned_empty
from deepspeed.zero.walk import Batch, Slice

__all__ = ["Delivery"]

_LINE_NBYTES = 64


class Delivery:
    """Staging memory for the values of two batches.

    Args:
        batches: that will be walked.
        is_pinned: lock the memory for the accelerator, so that copies from it run beside the step.
    """

    def __init__(self, batches: Sequence[Batch], *, is_pinned: bool) -> None:
        nbytes = max((sum(_nbytes(s) for s in _lent(batch)) for batch in batches), default=0)
        self._memory = [aligned_empty(nbytes, is_pinned=is_pinned) for _ in range(min(2, len(batches)) if nbytes else 0)]
        self._events: list[Any] = [None] * len(self._memory)
        self._next = 0

    def lend(self, batch: Batch) -> None:
        """Give the slices of `batch` memory for their values; blocks until what was in it has arrived."""
        slices = _lent(batch)
        if not slices:
            return
        event, memory = self._events[self._next], self._memory[self._next]
        if event is not None:
            event.synchronize()
        used = 0
        for s in slices:
            assert s.values is not None  # _lent
            s.values.data = memory[used : used + s.numel * s.values.itemsize].view(s.values.dtype)
            used += _nbytes(s)

    def send(self, batch: Batch) -> None:
        """Bring them to where they rest; copies to a device are queued."""
        slices = _lent(batch)
        if not slices:
            return
        for s in slices:
            assert s.values is not None  # _lent
            if s.flat.extent_at(s.start).away is None:
                s.flat.own_values(s.start, s.stop).copy_(s.values, non_blocking=True)
            else:
                s.flat.deliver_values(s.start, s.stop, s.values)
            s.values.data = stand_in(s.numel, s.values.dtype)
        accelerator = get_accelerator()
        event = accelerator.Event()
        accelerator.current_stream().record_event(event)
        self._events[self._next] = event
        self._next = (self._next + 1) % len(self._memory)


def stand_in(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros without memory of their own."""
    return torch.zeros((), dtype=dtype).expand(numel)


def _lent(batch: Batch) -> list[Slice]:
    return [s for s in batch.slices if s.values is not None and s.flat.lends_values]


def _nbytes(s: Slice) -> int:
    assert s.values is not None  # of _lent
    return -(-s.numel * s.values.itemsize // _LINE_NBYTES) * _LINE_NBYTES
