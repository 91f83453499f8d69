"""Gradients of all ranks become their mean, bucket by bucket, while backward still runs.

    autograd   g9 g8 | g7 g6 | g5 ...            one hook per parameter: "bucket, one fewer to wait for"
    bucket     [ 0  ]  full -> launch(0)          asynchronous, in ONE order that all ranks share
                       [ 1  ]  full -> launch(1)
    end        launch what is left (unused parameters count as zero), then wait: every shard holds its mean

What is kept between backward passes, and whether each of them is reduced or only the last before an update, is the
business of the stores (`zero.gradients`). Three facts carry the design:

1. The mean over ranks is linear: the mean of what was accumulated and the sum of the means of its parts are the same.
   Several backward calls per step, nested (reentrant) backward passes and `no_sync` all rest on this.
2. Buckets are launched in a fixed order, whatever order ranks finish them in, so collectives always pair up.
3. A bucket may only be launched before the end of backward when no parameter in it will receive another gradient in the
   same backward. In each backward up to the first reduction arrivals are counted; a bucket in which any parameter on any
   rank arrived twice (layers shared under reentrant recomputation) is left to the end for good. A rank may have no gradient
   at all in that step, so agreeing is part of the reduction. Where a whole gradient is kept, nothing is launched early
   before that is
   known; where only shards are kept it is, and what came late is launched again. [Note: arrivals are learned]

[Note: not ready] A client that runs backward several times over for one parameter (tiles of a sequence) says by
`param.ds_grad_is_ready = False` that more is to come. Until it is True again arrivals are not counted, and autograd adds to
`param.grad`; at the end of backward what is there counts, whatever the attribute says.

[Note: hooks hold nothing] Python's collector does not look into hooks of this kind. What they held would hold the parameter
in turn, and both for ever: an engine that is dropped without `destroy` would keep its model and masters in memory.

What does not live here: dividing by accumulation steps, loss scale, clipping (one factor in `zero.master`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from deepspeed import comm
from deepspeed.comm.watch import naming
from deepspeed.errors import UsageError
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.gradients import adopt_replaced
from deepspeed.zero.norm import total
from deepspeed.zero.row_sparse import mean_rows

_NAMES_SHOWN = 3

BucketCollected = Callable[[FlatGroup, int], None]
"""Told when the gradients of a bucket (group, number) have left autograd's hands."""


class _Bucket:
    """One bucket's progress through one backward."""

    def __init__(self, flat: FlatGroup, number: int, axis: AxisGroup) -> None:
        self.flat = flat
        self.number = number
        self.axis = axis
        bucket = flat.layout.buckets[number]
        self.slots = flat.layout.slots[bucket.first_slot : bucket.last_slot]
        self.order = min(flat.members[slot.index].order for slot in self.slots)
        self.pending = len(self.slots)
        self.is_launched = False
        self.is_deferred = False
        """Launched at the end of backward only ([Note: arrivals are learned])."""

        self.has_arrived_late = False
        self.brought: Tensor | None = None
        """Sum of all that this rank brought since the last update: an infinity or NaN in it stays to be seen."""

        self._label = f"gradients of {self.names()}"

    def launch(self) -> None:
        """Start the mean over ranks; remember what this rank brought, for `nonfinite_origin`."""
        mine = self.flat.gradients.collect(self.number)
        self.is_launched = True
        self.has_arrived_late = False
        if self.axis.size > 1:
            brought = total(mine)
            self.brought = brought if self.brought is None else self.brought + brought
        with naming(self._label):
            self._start()

    def _start(self) -> None:
        self.flat.gradients.launch(self.number)

    def take_over(self) -> None:
        """Bring gradients into a store that adds up micro-batches itself, in its own dtype, when nothing is reduced now."""
        store = self.flat.gradients
        if not (store.keeps_param_grads or store.reduces_every_backward):
            store.collect(self.number)

    def wait(self) -> None:
        """Block (the caller, or its stream) until the bucket is reduced."""
        with naming(self._label):
            self.flat.gradients.wait(self.number)

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.pending = len(self.slots)
        self.is_launched = self.has_arrived_late = False

    def names(self) -> str:
        """The first parameters, for messages."""
        return ", ".join(repr(self.flat.members[slot.index].name) for slot in self.slots[:_NAMES_SHOWN])

    def nonfinite_members(self) -> list[float]:
        """For each slot whether this rank's shard of its gradient holds an infinity or NaN now, as 0 or 1."""
        bad = []
        for position in range(*self._slot_range):
            parts = self.flat.own_parts(position)
            shards = [self.flat.gradients.shard(f.buffer_start, f.buffer_start + f.numel) for f in parts]
            bad.append(float(any(not bool(torch.isfinite(shard).all()) for shard in shards)))
        return bad

    @property
    def _slot_range(self) -> tuple[int, int]:
        bucket = self.flat.layout.buckets[self.number]
        return bucket.first_slot, bucket.last_slot


class _RowSparseBucket(_Bucket):
    """An embedding table: only the rows that some rank touched travel."""

    def _start(self) -> None:
        for slot in self.slots:
            gradient = self.flat.gradients.shard(slot.start, slot.stop)
            mean_rows(gradient.view(self.flat.shapes[slot.index]), self.axis)


class GradientReducer:
    """Hooks, buckets and waiting for one engine.

    Args:
        flats: the trained flat groups; their gradient stores are attached.
        axis: the ranks that run backward together.
        axis_of: the ranks over which the mean of a group's gradients is taken; None: all of `axis`.
        is_boundary: asked once at the start of each backward: is it the last before the update?
        check_scaled: called at the start of each backward; raises when the loss should have been scaled (fp16).
        is_overlapped: launch full buckets during backward (`overlap_comm`); False waits for each at once where buckets must
            not wait for the end of backward, and launches all at the end elsewhere.
        allows_unused: accept parameters without a gradient (`ignore_unused_parameters`).
        on_collected: see `BucketCollected`.
        on_over: told at the end of each backward, also of one that an exception has cut short.
    """

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        axis: AxisGroup,
        *,
        is_boundary: Callable[[], bool],
        axis_of: Callable[[FlatGroup], AxisGroup] | None = None,
        check_scaled: Callable[[], None] | None = None,
        is_overlapped: bool = True,
        allows_unused: bool = True,
        on_collected: BucketCollected | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> None:
        self.flats = tuple(flats)
        self.axis = axis
        self._is_boundary = is_boundary
        self._check_scaled = check_scaled
        self._trained = {} if allows_unused else _names_of(flats)
        self._unused = set(self._trained)  # no gradient since the last update
        self._on_collected = on_collected
        self._on_over = on_over
        self._is_overlapped = is_overlapped
        kinds = {True: _RowSparseBucket, False: _Bucket}
        buckets = [
            kinds[flat.kind.is_row_sparse](flat, number, axis if axis_of is None else axis_of(flat))
            for flat in flats
            for number in range(len(flat.layout.buckets))
        ]
        self._buckets = sorted(buckets, key=lambda bucket: -bucket.order)  # backward ends them in about this order
        self._next = 0
        self.reduces_every_backward = any(flat.gradients.reduces_every_backward for flat in flats)
        self._may_overlap = self.reduces_every_backward or (is_overlapped and axis.size > 1 and bool(buckets))
        learns = self._may_overlap and axis.size > 1
        self._arrivals: set[int] | None = set() if learns else None  # [Note: arrivals are learned]
        self._twice: set[int] = set()
        self._is_running = self._is_reducing = self._is_driven = False
        watches = check_scaled is not None or on_collected is not None or not allows_unused
        self.is_reduced = self._has_reduced = self._is_use_checked = False
        self.sync_enabled = True
        self._handles = self._install(is_needed=axis.size > 1 or watches)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _install(self, *, is_needed: bool) -> list[Any]:
        """One hook per parameter, where one is needed: alone and in place, autograd's own adds do everything."""
        return [
            self._hook(bucket, slot.index)
            for bucket in self._buckets
            if is_needed or not bucket.flat.gradients.keeps_param_grads
            for slot in bucket.slots
        ]

    def _hook(self, bucket: _Bucket, index: int) -> Any:
        """[Note: hooks hold nothing]."""
        param: Any = bucket.flat.members[index].param  # torch leaves this method untyped
        key, reducer, filled = id(param), weakref.ref(self), weakref.ref(bucket)

        def grad_ready(arrived: Tensor) -> None:
            if not getattr(arrived, "ds_grad_is_ready", True):  # [Note: not ready]
                return
            live, arrived_in = reducer(), filled()
            if live is not None and arrived_in is not None:
                live._gradient_ready(arrived_in, key)

        return param.register_post_accumulate_grad_hook(grad_ready)

    def _gradient_ready(self, bucket: _Bucket, key: int) -> None:
        if not self._is_running:
            self._before_backward()
        bucket.pending -= 1
        self._unused.discard(key)
        if self._arrivals is not None:
            self._count(bucket, key)
        if bucket.pending <= 0 and self._is_reducing:
            self._bucket_full(bucket)
        elif bucket.pending <= 0:
            bucket.take_over()

    def _before_backward(self) -> None:
        """The first gradient of a backward has arrived."""
        if self._check_scaled is not None:
            self._check_scaled()
        self._is_running = True
        self.is_reduced = False
        if self._arrivals is not None:
            self._arrivals.clear()
        is_early = self.reduces_every_backward or self._arrivals is None
        self._is_reducing = self._may_overlap and self._may_reduce and is_early
        if not self._is_driven:  # plain loss.backward(): ask autograd to call us when it is done
            Variable._execution_engine.queue_callback(self.after_backward)

    def _count(self, bucket: _Bucket, key: int) -> None:
        """[Note: arrivals are learned]."""
        assert self._arrivals is not None  # the hook asked
        if key in self._arrivals:
            self._twice.add(id(bucket))
        self._arrivals.add(key)

    def _bucket_full(self, bucket: _Bucket) -> None:
        if bucket.is_launched:
            if self.axis.size == 1:  # nobody to pair with: it is added
                self._launch(bucket)
                return
            if self._arrivals is None:
                raise UsageError(
                    f"the bucket of parameter {bucket.names()} received another gradient in one backward after it was "
                    "reduced; that did not happen in the first step: recomputation with use_reentrant=True was probably "
                    'switched on since. Recompute with use_reentrant=False, or (stages 0 and 1) set "zero_optimization": '
                    '{"overlap_comm": false}.'
                )
            bucket.has_arrived_late = True
            return
        while self._next < len(self._buckets) and self._is_ready(self._buckets[self._next]):
            self._launch(self._buckets[self._next])
            self._next += 1

    def _is_ready(self, bucket: _Bucket) -> bool:
        return bucket.pending <= 0 and not bucket.is_deferred

    def _launch(self, bucket: _Bucket) -> None:
        bucket.launch()
        if not self._is_overlapped:
            bucket.wait()
        if self._on_collected is not None:
            self._on_collected(bucket.flat, bucket.number)

    # -- one backward -------------------------------------------------------------------------------------------------

    @property
    def _may_reduce(self) -> bool:
        return self.reduces_every_backward or (self.sync_enabled and self._is_boundary())

    def drive(self, backward: Callable[[], None]) -> None:
        """Run `backward()` (it calls autograd) and finish what it started: the engine's own backward."""
        self._require_members()
        self._is_driven = True
        try:
            backward()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._is_driven = False
        self.after_backward()

    def after_backward(self) -> None:
        """Backward is over: where it is to be reduced, launch the rest and wait for all."""
        if self._may_reduce:
            self.reduce()
            self.is_reduced = self.is_reduced and self.sync_enabled and self._is_boundary()
        else:
            for bucket in self._buckets:
                if 0 < bucket.pending < len(bucket.slots):
                    bucket.take_over()
            self._end()

    def ensure_reduced(self) -> None:
        """Before an update: reduce unless backward has. Collective over `axis`.

        A gradient that the caller has replaced since then counts as it is now, on this rank; one that was dropped too, where
        `param.grad` shows gradients. Where every backward is reduced, a rank whose backward met no parameter at all takes
        part here, as far as that can be: when it had no other backward since the last update.
        """
        self._require_members()
        if not (self.is_reduced if not self.reduces_every_backward else self._has_reduced):
            self.reduce()
            self._refuse_unused()
            return
        self._refuse_unused()
        for bucket in self._buckets:
            if bucket.flat.gradients.keeps_param_grads:
                bucket.flat.gradients.collect(bucket.number)
        for flat in self.flats:
            if not flat.gradients.keeps_param_grads:
                adopt_replaced(flat)

    def reduce(self) -> None:
        """Bring every bucket to the mean over ranks. Collective over `axis`."""
        self._require_members()
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        if self._arrivals is not None:
            self._learn()
        for bucket in self._buckets:
            bucket.wait()
        self._has_reduced = True
        self.is_reduced = self.axis.size > 1  # alone there is nothing to redo, and `collect` must still see late edits
        self._end()
        # Last: a rank without unused parameters has launched all buckets by now, and would wait for those of another.
        if not self.reduces_every_backward or (self.sync_enabled and self._is_boundary()):
            self._refuse_unused()

    def _learn(self) -> None:
        """[Note: arrivals are learned]: all ranks agree, once any has seen gradients, in which buckets some arrive twice."""
        mine = [float(bool(self._arrivals))]
        mine += [float(id(bucket) in self._twice) + 2.0 * bucket.has_arrived_late for bucket in self._buckets]
        flags = torch.tensor(mine, device=self.flats[0].device)
        comm.all_reduce(flags, op=comm.ReduceOp.MAX, group=self.axis.group)
        has_arrivals, *of_buckets = flags.tolist()
        for bucket, flag in zip(self._buckets, of_buckets, strict=True):
            bucket.is_deferred |= flag > 0
            if flag >= 2:  # somewhere a gradient came after the launch: once more, on all ranks
                bucket.wait()
                bucket.launch()
        if has_arrivals:
            self._arrivals = None
            self._buckets.sort(key=lambda bucket: bucket.is_deferred)  # stable: the others keep their order

    def _refuse_unused(self) -> None:
        """Once per update, when all its backwards are over. All ranks agree first, so that all raise together."""
        if not self._trained or self._is_use_checked:
            return
        flag = torch.tensor(float(bool(self._unused)), device=self.flats[0].device)
        if self.axis.size > 1:
            comm.all_reduce(flag, op=comm.ReduceOp.MAX, group=self.axis.group)
        if flag.item():
            here = [repr(name) for key, name in self._trained.items() if key in self._unused]
            raise UsageError(
                f"{len(here)} of {len(self._trained)} parameters have no gradient since the last update on this rank"
                f"{': ' if here else ''}{', '.join(here[:_NAMES_SHOWN])}{', ...' if len(here) > _NAMES_SHOWN else ''}; "
                "zero_optimization.ignore_unused_parameters is false. Use them in the loss, freeze them, or leave it out."
            )
        self._is_use_checked = True

    def _end(self) -> None:
        self._is_running = self._is_reducing = False
        self._next = 0
        for bucket in self._buckets:
            bucket.reset()
        if self._on_over is not None:
            self._on_over()

    def close_window(self) -> None:
        """The update was made or skipped."""
        self.is_reduced = self._has_reduced = False
        for bucket in self._buckets:
            bucket.brought = None
        self._unused = set(self._trained)
        self._is_use_checked = False

    def abandon(self) -> None:
        """An exception left autograd: wait for what was started so that ranks stay paired, then forget it."""
        for bucket in self._buckets:
            bucket.wait()
        self._end()

    @property
    def is_running(self) -> bool:
        """A backward has begun and not ended; between two steps that means it was cut short by an exception."""
        return self._is_running

    # -- questions ----------------------------------------------------------------------------------------------------

    def nonfinite_origin(self) -> dict[str, list[int]]:
        """Names of parameters whose reduced gradient is not finite -> ranks that brought it. Collective over `axis`.

        Call on all ranks after `reduce()`, when the norm turned out not to be finite.
        """
        if not self.flats:  # a stage of a pipeline without parameters
            return {}
        origin: dict[str, list[int]] = {}
        for axis in dict.fromkeys(bucket.axis for bucket in self._buckets):  # in one order on all ranks
            origin.update(_nonfinite_origin([bucket for bucket in self._buckets if bucket.axis is axis], axis))
        if any(flat.kind.is_expert for flat in self.flats):  # other ranks have others
            found: list[Any] = [None] * self.axis.size
            comm.all_gather_object(found, origin, group=self.axis.group)
            origin = {name: ranks for of_rank in found for name, ranks in of_rank.items()}
        return origin

    @property
    def buckets(self) -> Sequence[_Bucket]:
        """In the order in which they are reduced."""
        return tuple(self._buckets)

    def _require_members(self) -> None:
        for flat in self.flats:
            flat.require_owned()

    def remove(self) -> None:
        """Take every hook off and release the flat groups; the reducer is of no more use."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for flat in self.flats:
            flat.release()


def _names_of(flats: Sequence[FlatGroup]) -> dict[int, str]:
    """Names of all parameters, by their id."""
    return {id(member.param): member.name for flat in flats for member in flat.members}


def _nonfinite_origin(buckets: Sequence[_Bucket], axis: AxisGroup) -> dict[str, list[int]]:
    device = buckets[0].flat.device
    zero = torch.zeros((), device=device)
    brought = [zero if bucket.brought is None else bucket.brought.float() for bucket in buckets]
    mine_B = torch.isfinite(torch.stack(brought)).logical_not().float()
    flags_RB = torch.ones(axis.size, len(buckets), device=device)
    members = torch.tensor([flag for bucket in buckets for flag in bucket.nonfinite_members()], device=device)
    if axis.size > 1:
        comm.all_gather_into_tensor(flags_RB.view(-1), mine_B, group=axis.group)
        comm.all_reduce(members, op=comm.ReduceOp.MAX, group=axis.group)
    is_bad = iter(members.tolist())
    origin: dict[str, list[int]] = {}
    for bucket, flags_R in zip(buckets, flags_RB.unbind(1), strict=True):
        ranks = [rank for rank, flag in zip(axis.ranks, flags_R.tolist(), strict=True) if flag > 0]
        names = [bucket.flat.members[slot.index].name for slot in bucket.slots if next(is_bad)]
        origin.update((name, ranks) for name in names)
    return origin
