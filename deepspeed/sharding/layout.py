"""Where each parameter lies in a flat buffer, and how that buffer is cut.

    use order          p0    p1    p2    p3            (the order of registration, close to the order of the forward)
    buffer             |p3|p2  |.|p1     |p0|....|     reverse order of use: what backward makes first lies first
    buckets            |-- 0 ---|-- 1 -----------|     at most `bucket_numel` elements, never cutting a parameter
    shards (world 2)   |0   |1  |0       |1      |     every bucket is cut into equal shards, so collectives are balanced
    shard space of 0   |0   |0       |                 a rank's shards one after another: numel / world_size elements,
    shard space of 1   |1  |1      |                   bucket [start, stop) covers [start / world, stop / world) of it

    .  padding to `alignment` elements after a parameter, and of each bucket to a multiple of alignment x world size

With a world of one, shard space is the buffer itself. Where parameters are sharded (stage 3), the buckets are the *units*
that are gathered together.

What does not live here: tensors (`zero.flat`), old layouts into new ones (`checkpoint` reads by name).

Source: ZeRO (arXiv:1910.02054), section 5; buckets as in PyTorch DDP (arXiv:2006.15704), section 3.2.3.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from deepspeed.errors import ArgumentError

_BUCKETS_PER_MODEL = 16
_LEAST_BUCKET_NUMEL = 1 << 20


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
    world_size: int = 1

    @classmethod
    def plan(
        cls,
        numels: Sequence[int],
        *,
        bucket_numel: int,
        alignment: int = 1,
        world_size: int = 1,
        units: Sequence[int] | None = None,
    ) -> FlatLayout:
        """Lay out parameters of `numels` elements, given in order of use.

        Args:
            numels: elements of each parameter (0 allowed).
            bucket_numel: most elements of one bucket; a larger parameter has a bucket of its own.
            alignment: every parameter starts at a multiple of this many elements.
            world_size: shards that each bucket is cut into.
            units: number of the unit of each parameter; then a bucket is a run of parameters of one unit, however large.

        Raises:
            ArgumentError: a size below its least value, or units that do not say one number per parameter.
        """
        if bucket_numel < 1 or alignment < 1 or world_size < 1 or any(n < 0 for n in numels):
            raise ArgumentError(
                f"FlatLayout.plan(bucket_numel={bucket_numel}, alignment={alignment}, world_size={world_size}, "
                f"smallest parameter {min(numels, default=0)}): the first three must be at least 1, numels at least 0."
            )
        if units is not None and len(units) != len(numels):
            raise ArgumentError(
                f"FlatLayout.plan() was given {len(units)} unit numbers for {len(numels)} parameters. Give one for each."
            )
        slots: list[Slot] = []
        buckets: list[Bucket] = []
        start = cursor = first = 0
        for index in reversed(range(len(numels))):
            padded = _round_up(numels[index], alignment)
            if units is not None:
                is_full = len(slots) > first and units[index] != units[slots[-1].index]
            else:
                is_full = cursor > start and cursor - start + padded > bucket_numel
            if is_full:
                cursor = start + _round_up(cursor - start, alignment * world_size)
                buckets.append(Bucket(start, cursor, first, len(slots)))
                start, first = cursor, len(slots)
            slots.append(Slot(index, cursor, numels[index]))
            cursor += padded
        if len(slots) > first:
            cursor = start + _round_up(cursor - start, alignment * world_size)
            buckets.append(Bucket(start, cursor, first, len(slots)))
        return cls(tuple(slots), tuple(buckets), cursor, world_size)

    def fragments(self, start: int, stop: int) -> Iterator[Fragment]:
        """The pieces of parameters inside `[start, stop)`, in buffer order; padding and empty parameters give none."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        for slot in self.slots[first:]:
            if slot.start >= stop:
                return
            low, high = max(slot.start, start), min(slot.stop, stop)
            if low < high:
                yield Fragment(slot.index, low - slot.start, low, high - low)

    # -- shards -------------------------------------------------------------------------------------------------------

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard space, padding included."""
        return self.numel // self.world_size

    def shard_range(self, bucket: Bucket) -> tuple[int, int]:
        """The elements of shard space that `bucket` covers, the same on every rank."""
        return bucket.start // self.world_size, bucket.stop // self.world_size

    def owned(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """The elements of the buffer that are `rank`'s shard of `bucket`."""
        numel = (bucket.stop - bucket.start) // self.world_size
        return bucket.start + rank * numel, bucket.start + (rank + 1) * numel

    def shard_fragments(self, rank: int, start: int = 0, stop: int | None = None) -> Iterator[Fragment]:
        """The pieces of parameters in `[start, stop)` of `rank`'s shard space; `buffer_start` counts in shard space."""
        stop = self.shard_numel if stop is None else stop
        first = max(bisect_right(self._shard_starts, start) - 1, 0)
        for bucket in self.buckets[first:]:
            begin, end = self.shard_range(bucket)
            low, high = max(start, begin), min(stop, end)
            if begin >= stop:
                return
            if low < high:
                shift = self.owned(bucket, rank)[0] - begin
                for f in self.fragments(low + shift, high + shift):
                    yield Fragment(f.index, f.param_start, f.buffer_start - shift, f.numel)

    def bucket_of(self, slot_number: int) -> Bucket:
        """The bucket that `slots[slot_number]` lies in."""
        return self.buckets[bisect_right(self._first_slots, slot_number) - 1]

    def holders(self, slot_number: int) -> Iterator[tuple[int, Fragment]]:
        """Who holds `slots[slot_number]`: (rank, its fragment with `buffer_start` in that rank's shard space), in order."""
        slot, bucket = self.slots[slot_number], self.bucket_of(slot_number)
        numel = (bucket.stop - bucket.start) // self.world_size
        begin = self.shard_range(bucket)[0]
        position = slot.start
        while position < slot.stop:
            rank = (position - bucket.start) // numel
            end = min(slot.stop, bucket.start + (rank + 1) * numel)
            offset = begin + position - bucket.start - rank * numel
            yield rank, Fragment(slot.index, position - slot.start, offset, end - position)
            position = end

    @cached_property
    def _starts(self) -> list[int]:
        return [slot.start for slot in self.slots]

    @cached_property
    def _first_slots(self) -> list[int]:
        return [bucket.first_slot for bucket in self.buckets]

    @cached_property
    def _shard_starts(self) -> list[int]:
        return [bucket.start // self.world_size for bucket in self.buckets]


def effective_bucket_numel(numels: Sequence[int], at_most: int) -> int:
    """Elements of a bucket when the config allows `at_most`: a sixteenth of all, so that reduction overlaps with backward.

    Never less than 2**20 unless `at_most` is: smaller collectives are ruled by their latency.
    """
    return max(1, min(at_most, max(sum(numels) // _BUCKETS_PER_MODEL, _LEAST_BUCKET_NUMEL)))


def even_range(numel: int, parts: int, part: int) -> tuple[int, int]:
    """Bounds of the `part`-th of `parts` contiguous ranges of `[0, numel)` whose sizes differ by at most one."""
    return numel * part // parts, numel * (part + 1) // parts


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
