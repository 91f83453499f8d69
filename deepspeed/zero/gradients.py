"""Where the gradients of a flat group are kept, from autograd's hands to the optimizer's.

                  between backward passes             a full bucket                     after the reduction
    Views         param.grad is a view of the buffer   is there already                  every rank holds the mean: stage 0
    Whole         the buffer; param.grad is None       one copy (or add) of all tensors  own shard is the mean: stage 1
    Sharded       own shard; param.grad is None        one copy into a bucket in flight  own shard += the mean: stages 2, 3

    autograd --> param.grad --collect--> bucket --launch, wait--> shard(start, stop) --> zero.master

The three follow one protocol (`zero.gradient_store`). They differ in memory and in when they reduce, not in what `shard`
gives: the mean over ranks of the sum over micro-batches. A collected bucket costs one operator however many parameters it
has, and nothing is zeroed before it is written.

What does not live here: when a bucket is full, and the order of launches (`zero.reducer`). `engine.build` makes the stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.comm.algorithms import FlatAllReducer, FlatReduceScatterer, ShardWork, Work
from deepspeed.sharding import Bucket
from deepspeed.zero.flat import FlatGroup

__all__ = ["ShardedGradients", "ViewGradients", "WholeGradients", "adopt_replaced", "largest_bucket_numel"]


class _Places:
    """The members of one bucket and where their gradients go, in slot order."""

    def __init__(self, flat: FlatGroup, bucket: Bucket) -> None:
        self.slots = flat.layout.slots[bucket.first_slot : bucket.last_slot]
        self.params = [flat.members[slot.index].param for slot in self.slots]
        self.shapes = [flat.shapes[slot.index] for slot in self.slots]
        self.start = bucket.start

    def views(self, bucket_F: Tensor) -> list[Tensor]:
        """Each member's place in `bucket_F`, the memory of the bucket."""
        begins = [slot.start - self.start for slot in self.slots]
        return [
            bucket_F[begin : begin + slot.numel].view(shape)
            for begin, slot, shape in zip(begins, self.slots, self.shapes, strict=True)
        ]

    def gaps(self, bucket_F: Tensor) -> list[Tensor]:
        """The padding of the bucket, which takes part in reductions and norms: it must be zero."""
        borders = [(slot.start - self.start, slot.stop - self.start) for slot in self.slots]
        begins, ends = [0, *[stop for _, stop in borders]], [*[start for start, _ in borders], bucket_F.numel()]
        return [bucket_F[begin:end] for begin, end in zip(begins, ends, strict=True) if begin < end]

    def take(self, views: Sequence[Tensor], gaps: Sequence[Tensor] = (), *, is_filled: bool) -> None:
        """Move every `param.grad` into its view: add to what is there, or (not `is_filled`) be all that is there."""
        there, grads, absent = [], [], list(gaps)
        for param, view in zip(self.params, views, strict=True):
            grad = param.grad
            if grad is None:
                absent.append(view)
            else:
                there.append(view)
                grads.append(_dense(grad))
                param.grad = None
        with torch.no_grad():
            if is_filled and there:
                torch._foreach_add_(there, grads)
            elif there:
                torch._foreach_copy_(there, grads)
            if absent and not is_filled:
                torch._foreach_zero_(absent)


class ViewGradients:
    """Gradients that autograd adds into a flat buffer in place; reduced to the mean on every rank."""

    reduces_every_backward = False
    keeps_param_grads = True
    spends_with_zeros = True

    def __init__(self, flat: FlatGroup, reducer: FlatAllReducer) -> None:
        self._flat = flat
        self._reducer = reducer
        self.buffer_F = reducer.buffer
        self._works: dict[int, Work] = {}
        self._params = [flat.members[slot.index].param for slot in flat.layout.slots]
        self._views = [self._view(position) for position in range(len(self._params))]
        self._point()

    @property
    def dtype(self) -> torch.dtype:
        """See `GradientStore`."""
        return self.buffer_F.dtype

    def _view(self, position: int) -> Tensor:
        slot = self._flat.layout.slots[position]
        return self.buffer_F[slot.start : slot.stop].view(self._flat.shapes[slot.index])

    def _point(self) -> None:
        for param, view in zip(self._params, self._views, strict=True):
            param.grad = view

    def collect(self, number: int) -> Tensor:
        """See `GradientStore`. `param.grad` is the truth wherever it is another tensor.

        A caller that ran `model.zero_grad()` detached the views: None then means zero; `model.to()` gives the views
        themselves other storage.

        Raises:
            UsageError: the parameter was converted to another dtype or device.
        """
        bucket = self._flat.layout.buckets[number]
        for position in range(bucket.first_slot, bucket.last_slot):
            self.collect_slot(position)
        return self.buffer_F[bucket.start : bucket.stop]

    def collect_slot(self, position: int) -> None:
        """`collect` for the parameter at one slot."""
        param, view, slot = self._params[position], self._views[position], self._flat.layout.slots[position]
        grad = param.grad
        if grad is view:
            if slot.numel == 0 or view.data_ptr() == self.buffer_F.data_ptr() + slot.start * self.buffer_F.itemsize:
                return
            view = self._views[position] = self._view(position)
        self._flat.refuse_converted(slot)
        if grad is None:
            view.zero_()
        else:
            view.copy_(_dense(grad))
        param.grad = view

    def launch(self, number: int) -> None:
        """See `GradientStore`."""
        bucket = self._flat.layout.buckets[number]
        self._works[number] = self._reducer.launch(bucket.start, bucket.stop)

    def wait(self, number: int) -> None:
        """See `GradientStore`."""
        work = self._works.pop(number, None)
        if work is not None:
            work.wait()

    def shard(self, start: int, stop: int) -> Tensor:
        """See `GradientStore`."""
        return self.buffer_F[start:stop]

    def shards(self) -> list[Tensor]:
        """See `GradientStore`."""
        return [self.buffer_F]

    def buffers(self) -> list[Tensor]:
        """See `GradientStore`."""
        return [self.buffer_F]

    def holds(self, number: int) -> bool:
        """See `GradientStore`. A zero that nothing was added to looks like any other."""
        return True

    def spend(self, start: int, stop: int) -> None:
        """See `GradientStore`."""
        self.buffer_F[start:stop].zero_()

    def close_window(self) -> None:
        """See `GradientStore`."""

    def drop(self) -> None:
        """See `GradientStore`."""
        self.buffer_F.zero_()
        self._point()

    def close(self) -> None:
        """See `GradientStore`."""
        self._views = []
        self._reducer.close()


class WholeGradients:
    """Gradients collected into a flat buffer; each rank's shard of it becomes the mean.

    [Note: carried] After a reduction only the own shard is meaningful. When another backward follows before the update, the
    shard is set aside, the bucket filled anew, and the shard added after the next reduction: the mean of a sum is the sum of
    the means. With `is_scattered` False (every rank gets the whole mean) filling on top is right by itself.
    """

    reduces_every_backward = False
    keeps_param_grads = False
    spends_with_zeros = False

    def __init__(self, flat: FlatGroup, reducer: FlatReduceScatterer | FlatAllReducer, *, is_scattered: bool) -> None:
        self._flat = flat
        self._reducer = reducer
        self._is_scattered = is_scattered
        self._buffer_F = reducer.buffer
        layout = flat.layout
        self._places = [_Places(flat, bucket) for bucket in layout.buckets]
        self._views = [
            places.views(self._buffer_F[bucket.start : bucket.stop])
            for places, bucket in zip(self._places, layout.buckets, strict=True)
        ]
        self._gaps = [
            places.gaps(self._buffer_F[bucket.start : bucket.stop])
            for places, bucket in zip(self._places, layout.buckets, strict=True)
        ]
        self._works: dict[int, Work | ShardWork] = {}
        self._is_filled = [False] * len(layout.buckets)
        self._is_reduced = [False] * len(layout.buckets)
        self._carried: dict[int, Tensor] = {}
        self._in_use: dict[int, ShardWork] = {}

    @property
    def dtype(self) -> torch.dtype:
        """See `GradientStore`."""
        return self._buffer_F.dtype

    def collect(self, number: int) -> Tensor:
        """See `GradientStore`."""
        bucket = self._flat.layout.buckets[number]
        in_use = self._in_use.pop(number, None)
        if in_use is not None:
            in_use.wait_free()
        if self._is_scattered and self._is_reduced[number]:  # [Note: carried]
            self._carried[number] = self._own(number).clone()
            self._is_filled[number] = False
        self._places[number].take(self._views[number], self._gaps[number], is_filled=self._is_filled[number])
        self._is_filled[number], self._is_reduced[number] = True, False
        return self._buffer_F[bucket.start : bucket.stop]

    def launch(self, number: int) -> None:
        """See `GradientStore`."""
        bucket = self._flat.layout.buckets[number]
        self._works[number] = self._reducer.launch(bucket.start, bucket.stop)

    def wait(self, number: int) -> None:
        """See `GradientStore`."""
        work = self._works.pop(number, None)
        if work is None:
            return
        work.wait()
        if self._is_scattered:
            self._in_use[number] = work  # type: ignore[assignment]  # a scatterer's works can be waited for twice
        carried = self._carried.pop(number, None)
        if carried is not None:
            self._own(number).add_(carried)
        self._is_reduced[number] = True

    def _own(self, number: int) -> Tensor:
        start, stop = self._flat.layout.owned(self._flat.layout.buckets[number], self._flat.axis.rank)
        return self._buffer_F[start:stop]

    def shard(self, start: int, stop: int) -> Tensor:
        """See `GradientStore`."""
        shift = self._flat.extent_at(start).shift
        return self._buffer_F[start + shift : stop + shift]

    def shards(self) -> list[Tensor]:
        """See `GradientStore`."""
        return [self.shard(extent.start, extent.stop) for extent in self._flat.extents]

    def buffers(self) -> list[Tensor]:
        """See `GradientStore`."""
        return [self._buffer_F]

    def holds(self, number: int) -> bool:
        """See `GradientStore`."""
        return self._is_filled[number]

    def spend(self, start: int, stop: int) -> None:
        """See `GradientStore`. The next collection overwrites it."""

    def close_window(self) -> None:
        """See `GradientStore`."""
        self._is_filled = [False] * len(self._is_filled)
        self._is_reduced = [False] * len(self._is_reduced)
        self._carried.clear()

    def drop(self) -> None:
        """See `GradientStore`."""
        self.close_window()
        _drop_param_grads(self._flat)

    def close(self) -> None:
        """See `GradientStore`."""
        self._reducer.close()


class ShardedGradients:
    """This rank's share of the gradients; whole buckets live only while they are in flight.

        pool      | bucket 3 | bucket 4 |          as many places as `scatterer.buffer` holds of the largest bucket
        shard_S   | 0 | 1 | 2 | 3 | 4 | ...        shard space, of the accumulation dtype

    A place of the pool is filled again when no rank reads it any more.
    """

    reduces_every_backward = True
    keeps_param_grads = False
    spends_with_zeros = False

    def __init__(
        self, flat: FlatGroup, scatterer: FlatReduceScatterer, dtype: torch.dtype, *, memory: Tensor | None = None
    ) -> None:
        self._flat = flat
        self._scatterer = scatterer
        layout = flat.layout
        self._shard_S = torch.zeros(layout.shard_numel, dtype=dtype, device=flat.device) if memory is None else memory
        self._places = [_Places(flat, bucket) for bucket in layout.buckets]
        self._place_numel = largest_bucket_numel(flat)
        places = max(1, scatterer.buffer.numel() // max(1, self._place_numel))  # one even where no parameter has elements
        self._users: list[ShardWork | None] = [None] * places
        self._next_place = 0
        self._memory: dict[tuple[int, int], tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        self._collected: dict[int, int] = {}
        self._works: dict[int, ShardWork] = {}
        self._is_filled = [False] * len(layout.buckets)

    @property
    def dtype(self) -> torch.dtype:
        """See `GradientStore`."""
        return self._shard_S.dtype

    def collect(self, number: int) -> Tensor:
        """See `GradientStore`. Blocks while the place is read by others."""
        place = self._next_place
        user = self._users[place]
        if user is not None:
            user.wait_free()
            self._users[place] = None
        self._next_place = (place + 1) % len(self._users)
        known = self._memory.get((number, place))
        if known is None:
            known = self._memory[number, place] = self._lay_out(number, place)
        bucket_F, views, gaps = known
        self._places[number].take(views, gaps, is_filled=False)
        self._collected[number] = place
        return bucket_F

    def _lay_out(self, number: int, place: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        bucket, places = self._flat.layout.buckets[number], self._places[number]
        start = place * self._place_numel
        bucket_F = self._scatterer.buffer[start : start + bucket.stop - bucket.start]
        return bucket_F, places.views(bucket_F), places.gaps(bucket_F)

    def launch(self, number: int) -> None:
        """See `GradientStore`."""
        place, bucket = self._collected.pop(number), self._flat.layout.buckets[number]
        start = place * self._place_numel
        begin, end = self._flat.layout.shard_range(bucket)
        work = self._scatterer.launch(
            start, start + bucket.stop - bucket.start, self._shard_S[begin:end], accumulate=self._is_filled[number]
        )
        self._is_filled[number] = True
        self._users[place] = self._works[number] = work

    def wait(self, number: int) -> None:
        """See `GradientStore`."""
        work = self._works.pop(number, None)
        if work is not None:
            work.wait()

    def shard(self, start: int, stop: int) -> Tensor:
        """See `GradientStore`."""
        return self._shard_S[start:stop]

    def shards(self) -> list[Tensor]:
        """See `GradientStore`. Zeroes what no backward has filled."""
        for number, is_filled in enumerate(self._is_filled):
            if not is_filled:
                begin, end = self._flat.layout.shard_range(self._flat.layout.buckets[number])
                self._shard_S[begin:end].zero_()
                self._is_filled[number] = True
        return [self._shard_S]

    def buffers(self) -> list[Tensor]:
        """See `GradientStore`."""
        return [self._shard_S, self._scatterer.buffer]

    def holds(self, number: int) -> bool:
        """See `GradientStore`."""
        return self._is_filled[number]

    def spend(self, start: int, stop: int) -> None:
        """See `GradientStore`. The next reduction overwrites it."""

    def close_window(self) -> None:
        """See `GradientStore`."""
        self._is_filled = [False] * len(self._is_filled)

    def drop(self) -> None:
        """See `GradientStore`."""
        self.close_window()
        _drop_param_grads(self._flat)

    def close(self) -> None:
        """See `GradientStore`."""
        self._scatterer.close()


def largest_bucket_numel(flat: FlatGroup) -> int:
    """Elements of the largest bucket, padding included."""
    return max((bucket.stop - bucket.start for bucket in flat.layout.buckets), default=0)


def adopt_replaced(flat: FlatGroup) -> None:
    """Let a `param.grad` that the caller has set after the reduction replace what was reduced: this rank's part of it."""
    for position, slot in enumerate(flat.layout.slots):
        param = flat.members[slot.index].param
        if param.grad is None:
            continue
        whole_F = _dense(param.grad).reshape(-1)
        param.grad = None
        for f in flat.own_parts(position):
            part = whole_F[f.param_start : f.param_start + f.numel]
            flat.gradients.shard(f.buffer_start, f.buffer_start + f.numel).copy_(part)


def _drop_param_grads(flat: FlatGroup) -> None:
    for member in flat.members:
        member.param.grad = None


def _dense(grad: Tensor) -> Tensor:
    dense = grad if grad.layout == torch.strided else grad.to_dense()
    return dense.detach() if dense.requires_grad else dense
