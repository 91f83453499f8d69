"""Parameters of one kind in one flat layout: whole on every rank, or sharded.

    whole      values   [p3|p2 |.|p1  |p0|..]      every param.data is a view; the same on all ranks between two updates
    sharded    values   [this rank's shard space]  param.data is empty, or a view of a gathered bucket (`zero.coordinator`)

    master     full precision, this rank's shard space only: what the optimizer updates. The same memory as `values` when the
               model is not 16-bit. A shard axis of one rank makes shard space and layout the same: stage 0.

    extents    runs of shard space that are one run of `values` too: all of it, or bucket by bucket where the shard axis
               has several ranks and parameters are whole

`values` is the buffer of a `comm` gatherer: other ranks read it, so it is written between `begin_update` and `publish` only.
Where parameters are whole the user may edit them between updates: it stays open for writing then (`reopen`).

What does not live here: gradients (`zero.gradients`), the update (`zero.master`), when a unit is gathered
(`zero.coordinator`). Callers: `engine.build`.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.comm.watch import naming
from deepspeed.errors import UsageError
from deepspeed.sharding import Bucket, FlatLayout, Fragment, Slot
from deepspeed.zero.published import publish, withdraw

if TYPE_CHECKING:
    from deepspeed.comm.algorithms import FlatGatherer, Work
    from deepspeed.topology.mesh import AxisGroup
    from deepspeed.zero.gradient_store import GradientStore

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register
_OWNER = "_ds_owner"  # the back-reference on a user's parameter: its Place


class Place:
    """Where a parameter lives, without keeping anything alive; a copy or a pickle of the parameter lives nowhere."""

    def __init__(self, group: FlatGroup, position: int, param: nn.Parameter) -> None:
        self.position = position
        self._group = weakref.ref(group)
        self._param = weakref.ref(param)

    def group_of(self, param: nn.Parameter) -> FlatGroup | None:
        """The flat group, None when it is gone or `param` is a copy."""
        return self._group() if self._param() is param else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, so that a saved model loads where this package is not installed."""
        return type(None), ()


@dataclass(frozen=True)
class NamedParameter:
    """A parameter under the name its module gives it; tied parameters appear once, under their first name."""

    name: str
    param: nn.Parameter
    order: int = 0
    """Position in the model's own order of registration, the best guess at the order of use before the first step."""

    unit: int = 0
    """Number of the unit it is gathered with, where parameters are sharded."""

    whole_shape: torch.Size | None = None
    """Of a parameter that is sharded already (`zero.Init`), whose own shape is (0,); None: ask the parameter."""


@dataclass(frozen=True)
class Kind:
    """What the parameters of one flat group have in common."""

    group_index: int
    """Of the optimizer's parameter group; -1 when nothing trains them."""

    param_dtype: torch.dtype
    master_dtype: torch.dtype
    is_sharded: bool = False
    is_row_sparse: bool = False
    """Embedding tables of which one micro-batch touches few rows: their gradients are reduced row by row."""

    is_low_precision: bool = False
    """Gradients travel in the autocast dtype (`lower_precision_safe_modules`)."""

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer updates them."""
        return self.group_index >= 0

    @property
    def alignment(self) -> int:
        """Elements that every parameter's place is a multiple of."""
        return ALIGNMENT_BYTES // min(self.param_dtype.itemsize, self.master_dtype.itemsize)


@dataclass(frozen=True)
class Extent:
    """Elements `[start, stop)` of shard space that lie in one piece of `values` too, `shift` elements further on."""

    start: int
    stop: int
    shift: int


WholeValue = Callable[[NamedParameter], Tensor]
"""Gives the whole value of a member, in any dtype; asked in slot order, on all ranks together."""


class FlatGroup:
    """The parameters of one kind, moved into a flat layout.

    Constructing it re-points `param.data` of every member at the buffer, or empties it (`kind.is_sharded`), one by one.
    `on_replaced` runs when another engine takes one of the parameters over; `before_edit` before values are replaced from
    outside a step; `optimizer` gives the `zero.optimizer.ZeroOptimizer` that steps the group, while there is one.

    Args:
        members: in order of use.
        kind: what they share.
        layout: planned over them, for the shard axis.
        gatherer: its buffer becomes `values`: `layout.numel` elements of the parameter dtype, or `layout.shard_numel`
            where parameters are sharded.
        axis: the shard axis.
        whole_value: where the values come from; None: the parameters themselves.
    """

    def __init__(
        self,
        members: Sequence[NamedParameter],
        kind: Kind,
        layout: FlatLayout,
        gatherer: FlatGatherer,
        axis: AxisGroup,
        *,
        whole_value: WholeValue | None = None,
    ) -> None:
        self.members = tuple(members)
        self.shapes = tuple(m.param.shape if m.whole_shape is None else m.whole_shape for m in members)
        self._strides = tuple(torch.empty(shape, device="meta").stride() for shape in self.shapes)
        self.kind = kind
        self.layout = layout
        self.gatherer = gatherer
        self.axis = axis
        self.on_replaced: Callable[[], None] = self.release
        self.before_edit: Callable[[], None] = lambda: None
        self.optimizer: Callable[[], object | None] = lambda: None
        self.values = gatherer.buffer
        self._empty = self.values.new_empty(0)
        self.extents = tuple(self._extents())
        self._shard_starts = [extent.start for extent in self.extents]
        is_split = kind.is_trained and kind.param_dtype != kind.master_dtype
        self._master_S = (
            torch.zeros(layout.shard_numel, dtype=kind.master_dtype, device=self.values.device) if is_split else None
        )
        self._adopt_values(whole_value or (lambda member: member.param.detach()))
        gatherer.publish()
        self._params = [self.members[slot.index].param for slot in self.layout.slots]  # in slot order: loops of each step
        self._addresses = [param.data_ptr() for param in self._params]
        self._versions = [param._version for param in self._params]
        self._gradients: GradientStore | None = None
        self._labels = [f"gather of {self._first_name(bucket)} and what is gathered with it" for bucket in layout.buckets]

    # -- places -------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded (stage 3)."""
        return self.kind.is_sharded

    def _extents(self) -> Iterator[Extent]:
        if self.is_sharded or self.axis.size == 1:
            yield Extent(0, self.layout.shard_numel, 0)
            return
        for bucket in self.layout.buckets:
            start, stop = self.layout.shard_range(bucket)
            yield Extent(start, stop, self.layout.owned(bucket, self.axis.rank)[0] - start)

    def extent_at(self, start: int) -> Extent:
        """The extent that holds element `start` of shard space."""
        return self.extents[bisect_right(self._shard_starts, start) - 1]

    def own_fragments(self, start: int = 0, stop: int | None = None) -> Iterator[Fragment]:
        """Pieces of parameters in `[start, stop)` of this rank's shard space."""
        return self.layout.shard_fragments(self.axis.rank, start, stop)

    def own_parts(self, position: int) -> list[Fragment]:
        """This rank's pieces of the parameter at `layout.slots[position]`, in order."""
        return [fragment for rank, fragment in self.layout.holders(position) if rank == self.axis.rank]

    def own_values(self, start: int, stop: int) -> Tensor:
        """The model's values of `[start, stop)` of shard space, within one extent; a view."""
        shift = self.extent_at(start).shift
        return self.values[start + shift : stop + shift]

    def own_master(self, start: int, stop: int) -> Tensor:
        """What the optimizer updates of `[start, stop)` of shard space, within one extent; a view."""
        return self.own_values(start, stop) if self._master_S is None else self._master_S[start:stop]

    @property
    def has_own_masters(self) -> bool:
        """Whether masters are other memory than the model's values."""
        return self._master_S is not None

    def whole_view(self, slot: Slot) -> Tensor:
        """The place of a parameter that is whole, in its shape."""
        return self.values[slot.start : slot.stop].view(self.shapes[slot.index])

    # -- values in ----------------------------------------------------------------------------------------------------

    def _adopt_values(self, whole_value: WholeValue) -> None:
        with torch.no_grad():
            for position, slot in enumerate(self.layout.slots):
                member = self.members[slot.index]
                release_owner(member.param)
                whole = whole_value(member).reshape(-1)
                if not self.is_sharded:
                    self.values[slot.start : slot.stop].copy_(whole)
                self._take_own(position, whole)
                member.param.grad = None
                member.param.data = self.values.new_empty(0) if self.is_sharded else self.whole_view(slot)
                setattr(member.param, _OWNER, Place(self, position, member.param))

    def _take_own(self, position: int, whole: Tensor) -> None:
        """Keep this rank's part of a flattened whole value: as master, and as shard where parameters are sharded."""
        for f in self.own_parts(position):
            own = whole[f.param_start : f.param_start + f.numel]
            if self._master_S is not None:
                self._master_S[f.buffer_start : f.buffer_start + f.numel].copy_(own)
            if self.is_sharded:
                self.values[f.buffer_start : f.buffer_start + f.numel].copy_(own)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Write `values` inside; afterwards other ranks may read them again. All ranks of the shard axis enter it.

        Does not gather what is whole: `gather_whole` does.
        """
        self.gatherer.begin_update()
        try:
            yield
        finally:
            self.gatherer.publish()

    def write_parameter(self, position: int, whole: Tensor) -> None:
        """Replace the parameter at `layout.slots[position]`, masters included. All ranks give the same value."""
        slot = self.layout.slots[position]
        self.before_edit()
        with torch.no_grad(), self.rewriting():
            flat = whole.detach().reshape(-1)
            if not self.is_sharded:
                self.values[slot.start : slot.stop].copy_(flat)
            self._take_own(position, flat)
        self._versions[position] = self._params[position]._version

    def adopt_edits(self) -> None:
        """Take over what the caller did to whole parameters since the last update, so that the coming one builds on it.

        Values written into a 16-bit parameter (`load_state_dict`, `torch.nn.init`, `copy_`) go into the master, where they
        differ from it; all ranks must write the same. A parameter that was given other storage (`param.data = ...`) is moved
        back into the buffer. Writing through `param.data` into the same storage cannot be noticed: use
        `deepspeed.utils.safe_set_full_fp32_param`. Sharded parameters are edited inside `zero.GatheredParameters`.

        Raises:
            UsageError: the other storage has another dtype, device or shape.
        """
        if self.is_sharded:
            return
        noted = zip(self._params, self._addresses, self._versions, strict=True)
        for position, (param, address, version) in enumerate(noted):
            if param.data_ptr() != address:
                self._move_back(self.layout.slots[position])
            elif param._version == version:
                continue
            self._versions[position] = param._version
            self._adopt_rounded(position)

    def adopt_all(self) -> None:
        """Take over the model's values as masters where they differ, whether or not an edit was noticed."""
        with torch.no_grad():
            for position in range(len(self.layout.slots)):
                self._adopt_rounded(position)

    def _move_back(self, slot: Slot) -> None:
        self.refuse_converted(slot)
        param, place = self.members[slot.index].param, self.whole_view(slot)
        place.copy_(param.detach())
        param.data = place

    def refuse_converted(self, slot: Slot) -> None:
        """Raise when a whole parameter has another dtype, device or size than its place."""
        member, place = self.members[slot.index], self.values
        got = (member.param.dtype, member.param.device, member.param.numel())
        if got != (place.dtype, place.device, slot.numel):
            raise UsageError(
                f"parameter {member.name!r} became {got[2]} elements of {got[0]} on {got[1]} after initialize(), but its "
                f"engine trains {slot.numel} elements of {place.dtype} on {place.device}. Convert the model before "
                "initialize(), or call engine.destroy() first and initialize again."
            )

    def _adopt_rounded(self, position: int) -> None:
        if self._master_S is None:
            return
        for f in self.own_parts(position):
            stop = f.buffer_start + f.numel
            master, rounded = self._master_S[f.buffer_start : stop], self.own_values(f.buffer_start, stop)
            is_edited = master.to(rounded.dtype) != rounded
            master.copy_(torch.where(is_edited, rounded.to(master.dtype), master))

    # -- masters to values to parameters ------------------------------------------------------------------------------

    def write_back(self, start: int, stop: int) -> None:
        """Round `[start, stop)` of the master, within one extent, into `values`."""
        if self._master_S is not None:
            self.own_values(start, stop).copy_(self._master_S[start:stop])

    def round_masters(self) -> None:
        """Make the master what it is after rounding to the model's dtype."""
        if self._master_S is not None:
            self._master_S.copy_(self._master_S.to(self.values.dtype))

    def write_back_all(self) -> None:
        """Round the whole master into `values`."""
        for extent in self.extents:
            self.write_back(extent.start, extent.stop)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Write `own_master` inside; afterwards the model holds it. All ranks of the shard axis enter it."""
        self.before_edit()
        with self.rewriting():
            yield
            self.write_back_all()
        for work in self.gather_whole():
            work.wait()
        self.reopen()

    def gather_whole(self) -> list[Work]:
        """Start to bring every rank's shards into whole parameters; nothing to do where they are sharded."""
        if self.is_sharded or self.axis.size == 1:
            return []
        return [self.gatherer.gather_in_place(bucket.start, bucket.stop) for bucket in self.layout.buckets]

    def reopen(self) -> None:
        """After a gather of whole parameters: block until no rank reads this one's, so that the user may edit them."""
        if not (self.is_sharded or self.axis.size == 1):
            self.gatherer.begin_update()

    def gather_bucket(self, number: int, into_F: Tensor) -> Work:
        """Start to bring bucket `number` of sharded parameters together in `into_F` (1-D, as long as the bucket)."""
        with naming(self._labels[number]):
            return self.gatherer.gather(*self.layout.shard_range(self.layout.buckets[number]), into_F)

    def show(self, number: int, whole_F: Tensor) -> None:
        """Let the parameters of bucket `number` be views of `whole_F`, a gathered bucket."""
        bucket = self.layout.buckets[number]
        shift = whole_F.storage_offset() - bucket.start
        for slot in self._slots_of(bucket):
            shape, strides = self.shapes[slot.index], self._strides[slot.index]
            self.members[slot.index].param.data = whole_F.as_strided(shape, strides, slot.start + shift)  # one operator

    def hide(self, number: int) -> None:
        """Empty the parameters of bucket `number`."""
        if self._empty.device != self.values.device:
            self._empty = self.values.new_empty(0)
        for slot in self._slots_of(self.layout.buckets[number]):
            self.members[slot.index].param.data = self._empty

    def publish_parameters(self) -> None:
        """Give sharded parameters the attributes that clients read; `zero.holder` knows who keeps them."""
        for position, slot in enumerate(self.layout.slots):
            parts = self.own_parts(position)
            begin = parts[0].buffer_start if parts else 0
            own = self.values[begin : begin + sum(part.numel for part in parts)]  # one run: a bucket has one shard here
            publish(self.members[slot.index].param, self.shapes[slot.index], own, group=self._group)

    @property
    def _group(self) -> Any:
        return self.axis.group if self.axis.size > 1 else None

    def gathered(self) -> Iterator[tuple[NamedParameter, Tensor]]:
        """Each member with its whole value, bucket by bucket. All ranks of the shard axis go through it."""
        for number, bucket in enumerate(self.layout.buckets):
            whole_F = self.values[bucket.start : bucket.stop]
            if self.is_sharded:
                whole_F = self.values.new_empty(bucket.stop - bucket.start)
                self.gather_bucket(number, whole_F).wait()
            for slot in self._slots_of(bucket):
                begin = slot.start - bucket.start
                yield self.members[slot.index], whole_F[begin : begin + slot.numel].view(self.shapes[slot.index])

    def _first_name(self, bucket: Bucket) -> str:
        return ", ".join(repr(self.members[slot.index].name) for slot in self._slots_of(bucket)[-1:])

    def _slots_of(self, bucket: Bucket) -> tuple[Slot, ...]:
        return self.layout.slots[bucket.first_slot : bucket.last_slot]

    # -- gradients and end of life ------------------------------------------------------------------------------------

    def attach_gradients(self, store: GradientStore) -> None:
        """Say where gradients are kept (once, before the first backward)."""
        self._gradients = store

    @property
    def gradients(self) -> GradientStore:
        """Where gradients are kept."""
        assert self._gradients is not None  # engine.build attaches them to every trained group
        return self._gradients

    def release(self) -> None:
        """Let go of gradients and back-references; whole parameters keep their values and work on without an engine."""
        for member in self.members:
            if owner_of(member.param) is self:  # else a newer engine has it, with its gradients
                delattr(member.param, _OWNER)
                member.param.grad = None
                if self.is_sharded:
                    withdraw(member.param)
        if self._gradients is not None:
            self._gradients.close()
        self.gatherer.close()


def release_owner(param: nn.Parameter) -> None:
    """Detach `param` from the engine it belonged to, if any: wrapping a model again replaces the earlier engine."""
    owner = owner_of(param)
    if owner is not None:
        owner.on_replaced()


def place_of(param: nn.Parameter) -> tuple[FlatGroup, int] | None:
    """The flat group that `param` lives in and the position of its slot there; None when no engine holds it."""
    place: Place | None = getattr(param, _OWNER, None)
    group = place.group_of(param) if place is not None else None
    return None if place is None or group is None else (group, place.position)


def owner_of(param: nn.Parameter) -> FlatGroup | None:
    """The flat group that `param` lives in; None for a parameter that no engine holds."""
    found = place_of(param)
    return None if found is None else found[0]
