"""Where each parameter lies in a flat buffer, and how that buffer is cut.

    use order          p0    p1    p2    p3            (the order of registration, close to the order of the forward)
    buffer             |p3|p2  |.|p1     |p0|....|     reverse order of use: what backward makes first lies first
    buckets            |-- 0 ---|-- 1 -----------|     at most `bucket_numel` elements, never cutting a parameter
    shards (world 2)   |0   |1  |0       |1      |     every bucket is cut into equal shards, so collectives are balanced

    .  padding to `alignment` elements after a parameter, and of each bucket to a multiple of alignment x world size

What does not live here: tensors (`zero.flat`), old layouts into new ones (`checkpoint` reads by name).

Source: ZeRO (arXiv:1910.02054), section 5; buckets as in PyTorch DDP (arXiv:2006.15704), section 3.2.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from deepspeed.errors import ArgumentError


@dataclass(frozen=True)
class Slot:
    """One parameter's place: elements `[start, start + numel)` of the buffer belong to parameter `index`."""

    index: int
    """Position of the parameter in the order of use that the layout was planned from."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        """First element after the parameter, padding excluded."""
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """Elements `[start, stop)`, padding included, that travel in one collective; `slots[first:last]` lie in it."""

    start: int
    stop: int
    first_slot: int
    last_slot: int


@dataclass(frozen=True)
class Fragment:
    """Elements `[param_start, param_start + numel)` of parameter `index`, at `buffer_start` of the buffer."""

    index: int
    param_start: int
    buffer_start: int
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """A planned flat buffer: slots in buffer order, buckets in buffer order, `numel` elements with padding."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    numel: int

    @classmethod
    def plan(cls, numels: Sequence[int], *, bucket_numel: int, alignment: int = 1, world_size: int = 1) -> FlatLayout:
        """Lay out parameters of `numels` elements, given in order of use.

        Args:
            numels: elements of each parameter (0 allowed).
            bucket_numel: most elements of one bucket; a larger parameter has a bucket of its own.
            alignment: every parameter starts at a multiple of this many elements.
            world_size: shards that each bucket is cut into.

        Raises:
            ArgumentError: a size below its least value.
        """
        if bucket_numel < 1 or alignment < 1 or world_size < 1 or any(n < 0 for n in numels):
            raise ArgumentError(
                f"FlatLayout.plan(bucket_numel={bucket_numel}, alignment={alignment}, world_size={world_size}, "
                f"smallest parameter {min(numels, default=0)}): the first three must be at least 1, numels at least 0."
            )
        slots: list[Slot] = []
        buckets: list[Bucket] = []
        start = cursor = first = 0
        for index in reversed(range(len(numels))):
            padded = _round_up(numels[index], alignment)
            if cursor > start and cursor - start + padded > bucket_numel:
                cursor = start + _round_up(cursor - start, alignment * world_size)
                buckets.append(Bucket(start, cursor, first, len(slots)))
                start, first = cursor, len(slots)
            slots.append(Slot(index, cursor, numels[index]))
            cursor += padded
        if len(slots) > first:
            cursor = start + _round_up(cursor - start, alignment * world_size)
            buckets.append(Bucket(start, cursor, first, len(slots)))
        return cls(tuple(slots), tuple(buckets), cursor)

    def fragments(self, start: int, stop: int) -> Iterator[Fragment]:
        """The pieces of parameters inside `[start, stop)`, in buffer order; padding and empty parameters give none."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        for slot in self.slots[first:]:
            if slot.start >= stop:
                return
            low, high = max(slot.start, start), min(slot.stop, stop)
            if low < high:
                yield Fragment(slot.index, low - slot.start, low, high - low)

    @cached_property
    def _starts(self) -> list[int]:
        return [slot.start for slot in self.slots]


def even_range(numel: int, parts: int, part: int) -> tuple[int, int]:
    """Bounds of the `part`-th of `parts` contiguous ranges of `[0, numel)` whose sizes differ by at most one."""
    return numel * part // parts, numel * (part + 1) // parts


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
