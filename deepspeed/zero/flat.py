"""Parameters of one kind in one flat layout: whole on every rank, or sharded.

    whole      values   [p3|p2 |.|p1  |p0|..]      every param.data is a view; the same on all ranks between two updates
    sharded    values   [this rank's shard space]  param.data is empty, or a view of a gathered bucket (`zero.coordinator`)

    master     full precision, this rank's shard space only: what the optimizer updates. The same memory as `values` when the
               model is not 16-bit. A shard axis of one rank makes shard space and layout the same: stage 0.

    extents    runs of shard space that are one run of `values` too (`zero.extents`)

    tier       sharded values that rest elsewhere than in `values` are read from there, whole or for a gather, and delivered
               there (`offload`)

`values` is the buffer of a `comm` gatherer: other ranks read it, so it is written between `begin_update` and `publish` only.
Where parameters are whole the user may edit them between updates: it stays open for writing then (`reopen`).

What does not live here: gradients (`zero.gradients`), the update (`zero.master`), when a unit is gathered
(`zero.coordinator`). Callers: `engine.build`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.comm.watch import naming
from deepspeed.common.calls import Calls
from deepspeed.common.deferred import DeferredTensor
from deepspeed.errors import FileIoError, UsageError
from deepspeed.offload.agreement import together
from deepspeed.sharding import Bucket, FlatLayout, Fragment, Slot
from deepspeed.zero.extents import Extent, extents_of
from deepspeed.zero.masters import Masters, MemoryMasters
from deepspeed.zero.members import ALIGNMENT_BYTES, Kind, NamedParameter, Place
from deepspeed.zero.published import publish, withdraw

if TYPE_CHECKING:
    from deepspeed.comm.algorithms import FlatGatherer, Work
    from deepspeed.offload.parameters import TieredShards
    from deepspeed.topology.mesh import AxisGroup
    from deepspeed.zero.gradient_store import GradientStore

__all__ = [
    "ALIGNMENT_BYTES",
    "FlatGroup",
    "Kind",
    "NamedParameter",
    "WholeValue",
    "owner_of",
    "place_of",
    "release_owner",
]

_OWNER = "_ds_owner"  # the back-reference on a user's parameter: its Place

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
        masters: where full-precision values rest; None: `values` serve, or, where those are of another dtype or rest
            apart, memory beside them.
        tier: where the values of some buckets rest; the gatherer's buffer then has room for the others alone.
        device: where gathered parameters are; None: where `values` are.
        is_apart: `values` are other memory than that of the device.
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
        masters: Masters | None = None,
        tier: TieredShards | None = None,
        device: torch.device | None = None,
        is_apart: bool = False,
    ) -> None:
        self.members = tuple(members)
        self.shapes = tuple(m.param.shape if m.whole_shape is None else m.whole_shape for m in members)
        self._strides = tuple(torch.empty(shape, device="meta").stride() for shape in self.shapes)
        self.kind = kind
        self.layout = layout
        self.gatherer = gatherer
        self.axis = axis
        self.on_replaced: Callable[[], None] = self.release
        self.before_edit = Calls()
        self.optimizer: Callable[[], object | None] = lambda: None
        self.values = gatherer.buffer
        self.tier = tier
        self._is_apart = is_apart
        self._empty = self.values.new_empty(0, device=device)
        self.extents = extents_of(layout, axis.rank, is_sharded=kind.is_sharded, away=() if tier is None else tier.buckets)
        self._shard_starts = [extent.start for extent in self.extents]
        self.masters = masters
        is_split = kind.is_trained and (kind.param_dtype != kind.master_dtype or self.keeps_values_apart)
        if masters is None and is_split:
            memory = torch.zeros(layout.shard_numel, dtype=kind.master_dtype, device=self.device)
            self.masters = MemoryMasters(memory)
        with self._agreeing_on_masters(), self._agreeing():
            self._adopt_values(whole_value or (lambda member: member.param.detach()))
            self._publish()
        self._params = [self.members[slot.index].param for slot in self.layout.slots]  # in slot order: loops of each step
        self._addresses = [param.data_ptr() for param in self._params]
        self._versions = [param._version for param in self._params]
        self._gradients: GradientStore | None = None
        self._is_released = False
        self.retains_values = False
        self._labels = [f"gather of {self._first_name(bucket)} and what is gathered with it" for bucket in layout.buckets]

    # -- places -------------------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded (stage 3)."""
        return self.kind.is_sharded

    @property
    def device(self) -> torch.device:
        """Where whole parameters are."""
        return self._empty.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.kind.param_dtype

    @property
    def keeps_values_apart(self) -> bool:
        """Whether the model's values rest where no optimizer steps: `deliver_values` brings them there."""
        return self.tier is not None or self._is_apart or (self.masters is not None and self.masters.is_apart)

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
        """The model's values of `[start, stop)` of shard space, within one extent; a view.

        Raises:
            UsageError: they rest on a tier. A fault of the library: `read_values` and `deliver_values` are for those.
        """
        extent = self.extent_at(start)
        if extent.away is not None:
            raise UsageError(
                f"the values of elements [{start}, {stop}) of a flat group rest on a tier, so there is no view of them. "
                "This is a fault of the library; please report it with the configuration."
            )
        return self.values[start + extent.shift : stop + extent.shift]

    @property
    def lends_values(self) -> bool:
        """Whether the optimizer writes rounded values into lent memory of the host, from which they are delivered."""
        return self.masters is not None and self.masters.is_apart and not self._is_apart

    def values_slot(self, start: int, stop: int) -> Tensor | None:
        """What the walk writes rounded values of `[start, stop)` to: a view, a stand-in for lent memory, None: deliver."""
        is_stepped_on_host = self.masters is not None and self.masters.is_apart
        if self.extent_at(start).away is not None or (self._is_apart and not is_stepped_on_host):
            return None
        if self.lends_values:
            return torch.zeros((), dtype=self.values.dtype).expand(stop - start)
        return self.own_values(start, stop)

    def read_values(self, start: int, stop: int) -> Tensor:
        """The model's values of `[start, stop)` of shard space, within one extent: a view, or read from the tier."""
        extent = self.extent_at(start)
        if self.tier is None or extent.away is None:
            return self.own_values(start, stop)
        return self.tier.read(extent.away, start - extent.start, stop - extent.start)

    def deliver_values(self, start: int, stop: int, source: Tensor) -> None:
        """Replace the values of `[start, stop)` of shard space, within one extent, by `source`, rounded.

        Only inside `rewriting`, at whose end they are where they rest; `source` may change at once.
        """
        extent = self.extent_at(start)
        if self.tier is None or extent.away is None:
            self.own_values(start, stop).copy_(source)
        else:
            self.tier.write(extent.away, start - extent.start, source)

    @property
    def values_version(self) -> int:
        """Grows whenever this rank's values are written to."""
        return self.values._version + (0 if self.tier is None else self.tier.version)

    def own_master(self, start: int, stop: int) -> Tensor:
        """What the optimizer updates of `[start, stop)` of shard space, within one extent; a view."""
        return self.own_values(start, stop) if self.masters is None else self.masters.view(start, stop)

    def master_slot(self, start: int, stop: int) -> Tensor:
        """What the walk steps of `[start, stop)`, within one extent: `own_master`, or a stand-in (`Masters.slot`)."""
        return self.own_values(start, stop) if self.masters is None else self.masters.slot(start, stop)

    def read_master(self, start: int, stop: int) -> Tensor:
        """The full-precision values of `[start, stop)` of shard space, within one extent: a view, or a copy."""
        return self.read_values(start, stop) if self.masters is None else self.masters.read(start, stop)

    def deferred_master(self, start: int, stop: int) -> Tensor | DeferredTensor:
        """The same for a checkpoint: a view, or what reads them when they are written."""
        if self.masters is not None:
            return self.masters.deferred(start, stop)
        if self.extent_at(start).away is None:
            return self.own_values(start, stop)
        return DeferredTensor(stop - start, self.values.dtype, lambda: self.read_values(start, stop))

    @contextmanager
    def editing_master(self, start: int, stop: int, *, reads: bool = True) -> Iterator[Tensor]:
        """Change them inside. `reads` False: all of them are overwritten, so what it gives is undefined."""
        if self.masters is None:
            values = self.read_values(start, stop)
            yield values
            if self.extent_at(start).away is not None:
                self.deliver_values(start, stop, values)
            return
        with self.masters.editing(start, stop, reads=reads) as values:
            yield values

    @property
    def master_device(self) -> torch.device:
        """Where the optimizer steps."""
        return self.values.device if self.masters is None else self.masters.device

    @property
    def has_own_masters(self) -> bool:
        """Whether masters are other memory than the model's values."""
        return self.masters is not None

    def whole_view(self, slot: Slot) -> Tensor:
        """The place of a parameter that is whole, in its shape."""
        return self.values[slot.start : slot.stop].view(self.shapes[slot.index])

    # -- values in ----------------------------------------------------------------------------------------------------

    def _adopt_values(self, whole_value: WholeValue) -> None:
        with torch.no_grad():
            for number, bucket in enumerate(self.layout.buckets):
                first = self.layout.shard_range(bucket)[0]
                fresh = self._fresh(number)
                for position in range(bucket.first_slot, bucket.last_slot):
                    slot = self.layout.slots[position]
                    self._adopt(position, whole_value(self.members[slot.index]).reshape(-1), fresh, first)
                if fresh is not None:
                    self.deliver_values(first, first + fresh.numel(), fresh)

    def _fresh(self, number: int) -> Tensor | None:
        """Memory in which the shard of a bucket that rests on the tier is put together; None for other buckets."""
        if self.tier is None or number not in self.tier.buckets:
            return None
        start, stop = self.layout.shard_range(self.layout.buckets[number])
        return torch.zeros(stop - start, dtype=self.values.dtype)

    def _adopt(self, position: int, whole: Tensor, fresh: Tensor | None, first: int) -> None:
        slot = self.layout.slots[position]
        param = self.members[slot.index].param
        release_owner(param)
        if not self.is_sharded:
            self.values[slot.start : slot.stop].copy_(whole)
        self._take_own(position, whole, fresh, first)
        param.grad = None
        param.data = self.new_whole(0) if self.is_sharded else self.whole_view(slot)
        setattr(param, _OWNER, Place(self, position, param))

    def _take_own(self, position: int, whole: Tensor, fresh: Tensor | None = None, first: int = 0) -> None:
        """Keep this rank's part of a flattened whole value: as master, and as shard where parameters are sharded.

        The shard goes to `fresh`, whose first element is `first` of shard space, where that is given.
        """
        for f in self.own_parts(position):
            own = whole[f.param_start : f.param_start + f.numel]
            if self.masters is not None:
                self.masters.write(f.buffer_start, own)
            if fresh is not None:
                fresh[f.buffer_start - first : f.buffer_start - first + f.numel].copy_(own)
            elif self.is_sharded:
                self.deliver_values(f.buffer_start, f.buffer_start + f.numel, own)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Write `values` inside; afterwards other ranks may read them again. All ranks of the shard axis enter it.

        Does not gather what is whole: `gather_whole` does.
        """
        with self._agreeing():
            if self.tier is not None:
                self.tier.begin_update()  # first: after an error it refuses, and nothing is changed
            self.gatherer.begin_update()
            try:
                yield
            finally:
                self._publish()

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Errors with the tier's files that one rank meets inside are raised on all."""
        if self.tier is None:
            yield
            return
        try:
            with together(self.axis, self.device):
                yield
        except FileIoError:
            self.tier.fail()
            raise

    def _agreeing_on_masters(self) -> AbstractContextManager[None]:
        """The same for full-precision values on a disk."""
        is_on_disk = self.masters is not None and self.masters.is_on_disk
        return together(self.axis, self.device) if is_on_disk else nullcontext()

    def _publish(self) -> None:
        if self.tier is not None:
            self.tier.publish()
        self.gatherer.publish()

    def write_parameter(self, position: int, whole: Tensor) -> None:
        """Replace the parameter at `layout.slots[position]`, masters included. All ranks give the same value."""
        slot = self.layout.slots[position]
        self.before_edit()
        with torch.no_grad(), self._agreeing_on_masters(), self.rewriting():
            flat = whole.detach().reshape(-1)
            if not self.is_sharded:
                self.values[slot.start : slot.stop].copy_(flat)
            self._take_own(position, flat)
        self._versions[position] = self._params[position]._version

    def edited(self) -> list[int]:
        """Positions among `layout.slots` of what the caller has done something to since it was last taken over.

        Noticed are writes into a whole parameter (`load_state_dict`, `torch.nn.init`, `copy_`) and other storage
        (`param.data = ...`). Writing through `param.data` into the same storage cannot be noticed: use
        `deepspeed.utils.safe_set_full_fp32_param`. Sharded parameters are edited inside `zero.GatheredParameters`.
        """
        if self.is_sharded:
            return []
        noted = zip(self._params, self._addresses, self._versions, strict=True)
        return [
            position
            for position, (param, address, version) in enumerate(noted)
            if param._version != version or param.data_ptr() != address
        ]

    def is_edited(self, position: int) -> bool:
        """Whether `edited` would name this one."""
        param = self._params[position]
        seen = (self._versions[position], self._addresses[position])
        return not self.is_sharded and (param._version, param.data_ptr()) != seen

    def adopt_edits(self, positions: Iterable[int] | None = None) -> None:
        """Take over what `edited` found (None: all of it), so that whatever is done with masters builds on it.

        Values written into a 16-bit parameter go into the master, where they differ from it; all ranks must write the
        same. A parameter that was given other storage is moved back into the buffer.

        Raises:
            UsageError: the other storage has another dtype, device or shape.
        """
        for position in self.edited() if positions is None else positions:
            param = self._params[position]
            if param.data_ptr() != self._addresses[position]:
                self._move_back(self.layout.slots[position])
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
        if self.masters is None:
            return
        for f in self.own_parts(position):
            stop = f.buffer_start + f.numel
            rounded = self.read_values(f.buffer_start, stop).to(self.masters.device)
            with self.masters.editing(f.buffer_start, stop) as master:
                is_edited = master.to(rounded.dtype) != rounded
                master.copy_(torch.where(is_edited, rounded.to(master.dtype), master))

    # -- masters to values to parameters ------------------------------------------------------------------------------

    def write_back(self, start: int, stop: int) -> None:
        """Round `[start, stop)` of the master, within one extent, into `values`."""
        if self.masters is not None:
            for begin, end in self.masters.blocks(start, stop):
                self.deliver_values(begin, end, self.masters.read(begin, end))

    def round_masters(self) -> None:
        """Make the master what it is after rounding to the model's dtype."""
        if self.masters is not None:
            for start, stop in self.masters.blocks(0, self.layout.shard_numel):
                with self.masters.editing(start, stop) as values:
                    values.copy_(values.to(self.values.dtype))

    def write_back_all(self) -> None:
        """Round the whole master into `values`."""
        for extent in self.extents:
            self.write_back(extent.start, extent.stop)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Write masters inside (`editing_master`); afterwards the model holds it. All ranks of the shard axis enter it."""
        self.before_edit()
        with self.rewriting(), self._agreeing_on_masters():
            if self.masters is not None:
                self.masters.restore()
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
        start, stop = self.layout.shard_range(self.layout.buckets[number])
        with naming(self._labels[number]):
            if self.tier is not None and number in self.tier.buckets:
                return self.tier.gather(number, into_F)
            shift = self._shift_of(start, stop)
            return self.gatherer.gather(start + shift, stop + shift, into_F)

    def view_bucket(self, number: int) -> Tensor | None:
        """Bucket `number` of sharded parameters, where `values` have all of it: a view. None: `gather_bucket` brings it."""
        if self.tier is not None and number in self.tier.buckets:
            return None
        start, stop = self.layout.shard_range(self.layout.buckets[number])
        shift = self._shift_of(start, stop)
        return self.gatherer.view(start + shift, stop + shift)

    def _shift_of(self, start: int, stop: int) -> int:
        return self.extent_at(start).shift if start < stop else -start

    def new_whole(self, numel: int) -> Tensor:
        """Memory for `numel` gathered elements; its content does not matter."""
        return self._empty.new_empty(numel)

    def show(self, number: int, whole_F: Tensor) -> None:
        """Let the parameters of bucket `number` be views of `whole_F`, a gathered bucket."""
        bucket = self.layout.buckets[number]
        shift = whole_F.storage_offset() - bucket.start
        for slot in self._slots_of(bucket):
            shape, strides = self.shapes[slot.index], self._strides[slot.index]
            self.members[slot.index].param.data = whole_F.as_strided(shape, strides, slot.start + shift)  # one operator

    def hide(self, number: int) -> None:
        """Empty the parameters of bucket `number`."""
        for slot in self._slots_of(self.layout.buckets[number]):
            self.members[slot.index].param.data = self._empty

    def publish_parameters(self) -> None:
        """Give sharded parameters the attributes that clients read; `zero.holder` knows who keeps them."""
        for position, slot in enumerate(self.layout.slots):
            parts = self.own_parts(position)
            begin = parts[0].buffer_start if parts else 0
            is_away = bool(parts) and self.extent_at(begin).away is not None
            numel = sum(part.numel for part in parts)  # one run: a bucket has one shard here
            is_here = numel > 0 and not is_away
            own = self.own_values(begin, begin + numel) if is_here else self.values.new_empty(numel, device="meta")
            publish(self.members[slot.index].param, self.shapes[slot.index], own, group=self._group, is_remote=is_away)

    @property
    def _group(self) -> Any:
        return self.axis.group if self.axis.size > 1 else None

    def gathered(self) -> Iterator[tuple[NamedParameter, Tensor]]:
        """Each member with its whole value, bucket by bucket. All ranks of the shard axis go through it."""
        for number, bucket in enumerate(self.layout.buckets):
            whole_F = self.values[bucket.start : bucket.stop]
            if self.is_sharded:
                whole_F = self.new_whole(bucket.stop - bucket.start)
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
        self._is_released = True
        for member in self.members:
            if owner_of(member.param) is self:  # else a newer engine has it, with its gradients
                delattr(member.param, _OWNER)
                member.param.grad = None
                withdraw(member.param)
        for part in (self._gradients, self.masters):
            if part is not None:
                part.close()
        if not self.retains_values:
            self.close_values()

    def close_values(self) -> None:
        """Let go of what values rest in; follows `release` where that retains them for parameters yet to be gathered."""
        if self.tier is not None:
            self.tier.close()
        self.gatherer.close()

    def require_owned(self) -> None:
        """Raise UsageError after `release()`."""
        if self._is_released:
            raise UsageError(
                "this engine no longer owns its parameters: another deepspeed.initialize() wrapped all or some of them. "
                "Use the newer engine, or give the two engines models that share no parameter."
            )


def release_owner(param: nn.Parameter) -> None:
    """Detach `param` from the engine it belonged to, if any: wrapping a model again replaces the earlier engine."""
    owner = owner_of(param)
    if owner is not None:
        owner.on_replaced()


def place_of(param: nn.Parameter) -> tuple[FlatGroup, int] | None:
    """The flat group that `param` lives in and the position of its slot there; None when no engine holds it."""
    place: Place[FlatGroup] | None = getattr(param, _OWNER, None)
    group = place.group_of(param) if place is not None else None
    return None if place is None or group is None else (group, place.position)


def owner_of(param: nn.Parameter) -> FlatGroup | None:
    """The flat group that `param` lives in; None for a parameter that no engine holds."""
    found = place_of(param)
    return None if found is None else found[0]
