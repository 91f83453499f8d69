"""Gradients of all ranks become their mean, bucket by bucket, while backward still runs.

    autograd   g9 g8 | g7 g6 | g5 ...            one hook per parameter: "bucket, one fewer to wait for"
    bucket     [ 0  ]  full -> launch(0)          asynchronous, in place, in ONE order that all ranks share
                       [ 1  ]  full -> launch(1)
    end        launch what is left (unused parameters count as zero), then wait: every bucket holds the mean

Three facts carry the design:

1. The result is the mean of what the buffer holds, and after a reduction all ranks hold the same A. If more gradients l_r
   are added before `step()`, the mean of (A + l_r) is A + mean(l_r): reducing again is right, and nothing need be kept
   apart. Several backward calls per step, nested (reentrant) backward passes and `no_sync` all rest on this.
2. Buckets are launched in a fixed order, whatever order ranks finish them in, so collectives always pair up.
3. A bucket may only be launched before the end of backward when no parameter in it will receive another gradient in the
   same backward. Each backward up to the first reduction counts arrivals and launches nothing early; when any parameter on
   any rank arrives twice within one backward (layers shared under reentrant recomputation), overlap stays off for good. A
   rank may have no gradient at all in that step, so agreeing is part of the reduction. [Note: arrivals are learned]

What does not live here: dividing by accumulation steps, loss scale, clipping (one factor in `zero.master`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.sharding import Bucket
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.norm import total
from deepspeed.zero.row_sparse import mean_rows


class _Work(Protocol):
    def wait(self) -> Any: ...


class _DenseBucket:
    """One bucket's progress through one backward."""

    def __init__(self, flat: FlatGroup, bucket: Bucket, axis: AxisGroup) -> None:
        self.flat = flat
        self.bucket = bucket
        self.axis = axis
        self.slots = flat.layout.slots[bucket.first_slot : bucket.last_slot]
        self.order = min(flat.members[slot.index].order for slot in self.slots)
        self.pending = len(self.slots)
        self.is_launched = False
        self.has_nonfinite: Tensor | None = None
        self._work: _Work | None = None

    def launch(self) -> None:
        """Start the mean over ranks; remember whether this rank brought a non-finite value."""
        self.flat.collect(self.bucket.first_slot, self.bucket.last_slot)
        self.is_launched = True
        if self.axis.size > 1:
            values = self.flat.gradients_F[self.bucket.start : self.bucket.stop]
            self.has_nonfinite = torch.isfinite(total(values)).logical_not()
            self._start()

    def _start(self) -> None:
        self._work = self.flat.reducer.launch(self.bucket.start, self.bucket.stop)

    def wait(self) -> None:
        """Block (the caller, or its stream) until the bucket holds the mean."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.pending = len(self.slots)
        self.is_launched = False

    def nonfinite_names(self) -> list[str]:
        """Parameters of the bucket whose gradient holds an infinity or NaN now."""
        grads = self.flat.gradients_F
        bad = [slot for slot in self.slots if not bool(torch.isfinite(grads[slot.start : slot.stop]).all())]
        return [self.flat.members[slot.index].name for slot in bad]


class _RowSparseBucket(_DenseBucket):
    """An embedding table: only the rows that some rank touched travel."""

    def _start(self) -> None:
        for slot in self.slots:
            shape = self.flat.members[slot.index].param.shape
            mean_rows(self.flat.gradients_F[slot.start : slot.stop].view(shape), self.axis)


class GradientReducer:
    """Hooks, buckets and waiting for one engine.

    Args:
        flats: the flat groups; their gradient buffers are attached.
        axis: the ranks whose mean is taken.
        is_boundary: asked once at the start of each backward: may this one reduce?
        check_scaled: called at the start of each backward; raises when the loss should have been scaled (fp16).
        is_overlapped: launch full buckets during backward (`overlap_comm`).
    """

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        axis: AxisGroup,
        *,
        is_boundary: Callable[[], bool],
        check_scaled: Callable[[], None] | None = None,
        is_overlapped: bool = True,
    ) -> None:
        self.flats = tuple(flats)
        self.axis = axis
        self._is_boundary = is_boundary
        self._check_scaled = check_scaled
        kinds = {True: _RowSparseBucket, False: _DenseBucket}
        buckets = [kinds[flat.is_row_sparse](flat, bucket, axis) for flat in flats for bucket in flat.layout.buckets]
        self._buckets = sorted(buckets, key=lambda bucket: -bucket.order)  # backward ends them in about this order
        self._next = 0
        self._may_overlap = is_overlapped and axis.size > 1 and bool(buckets)
        self._arrivals: set[int] | None = set() if self._may_overlap else None  # [Note: arrivals are learned]
        self._has_shared = False
        self._is_running = self._is_reducing = self._is_driven = False
        self.is_reduced = self._is_removed = False
        self.sync_enabled = True
        self._handles = self._install()

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _install(self) -> list[Any]:
        """One hook per parameter, where one is needed: alone and in place, autograd's own adds do everything."""
        for flat in self.flats:
            flat.on_replaced = self.remove
        is_needed = self.axis.size > 1 or self._check_scaled is not None
        return [
            self._hook(bucket, position)
            for bucket in self._buckets
            if is_needed or not bucket.flat.accumulates_in_place
            for position in range(bucket.bucket.first_slot, bucket.bucket.last_slot)
        ]

    def _hook(self, bucket: _DenseBucket, position: int) -> Any:
        flat = bucket.flat
        index = flat.layout.slots[position].index
        in_place = flat.accumulates_in_place

        def grad_ready(_: Tensor) -> None:
            if not self._is_running:
                self._before_backward()
            if not in_place:
                flat.collect(position, position + 1)
            bucket.pending -= 1
            if self._arrivals is not None:
                self._count(id(flat.members[index].param))
            elif bucket.pending <= 0 and self._is_reducing:
                self._bucket_full(bucket)

        param: Any = flat.members[index].param  # torch leaves this method untyped
        return param.register_post_accumulate_grad_hook(grad_ready)

    def _before_backward(self) -> None:
        """The first gradient of a backward has arrived."""
        if self._check_scaled is not None:
            self._check_scaled()
        self._is_running = True
        self.is_reduced = False
        if self._arrivals is not None:
            self._arrivals.clear()
        self._is_reducing = self._may_overlap and self._may_reduce
        if not self._is_driven:  # plain loss.backward(): ask autograd to call us when it is done
            Variable._execution_engine.queue_callback(self.after_backward)

    def _count(self, key: int) -> None:
        """[Note: arrivals are learned]."""
        assert self._arrivals is not None  # the hook asked
        self._has_shared |= key in self._arrivals
        self._arrivals.add(key)

    def _bucket_full(self, bucket: _DenseBucket) -> None:
        if bucket.is_launched:
            name = bucket.flat.members[bucket.slots[0].index].name
            raise UsageError(
                f"the bucket of parameter {name!r} received another gradient in one backward after it was reduced; that "
                "did not happen in the first step: recomputation with use_reentrant=True was probably switched on since. "
                'Set "zero_optimization": {"overlap_comm": false}, or recompute with use_reentrant=False.'
            )
        while self._next < len(self._buckets) and self._buckets[self._next].pending <= 0:
            self._buckets[self._next].launch()
            self._next += 1

    # -- one backward -------------------------------------------------------------------------------------------------

    @property
    def _may_reduce(self) -> bool:
        return self.sync_enabled and self._is_boundary()

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
        """Backward is over: at a boundary, launch the rest and wait for all."""
        if self._may_reduce:
            self.reduce()
        else:
            self._end()

    def ensure_reduced(self) -> None:
        """Before an update: reduce unless backward has. Collective over `axis`.

        A gradient that the caller has dropped or replaced since then counts as it is now, on this rank.
        """
        if not self.is_reduced:
            self.reduce()
            return
        self._require_members()
        for flat in self.flats:
            flat.collect()

    def reduce(self) -> None:
        """Bring every bucket to the mean over ranks. Collective over `axis`."""
        self._require_members()
        for bucket in self._buckets[self._next :]:
            bucket.launch()
        for bucket in self._buckets:
            bucket.wait()
        if self._arrivals is not None:
            self._learn()
        self.is_reduced = self.axis.size > 1  # alone there is nothing to redo, and `collect` must still see late edits
        self._end()

    def _learn(self) -> None:
        """[Note: arrivals are learned]: all ranks agree, once any has seen gradients, whether a parameter arrives twice."""
        flags = torch.tensor([bool(self._arrivals), self._has_shared], dtype=torch.float32)
        flags = flags.to(self.flats[0].parameters_F.device)
        comm.all_reduce(flags, op=comm.ReduceOp.MAX, group=self.axis.group)
        has_arrivals, has_shared = flags.tolist()
        if has_arrivals:
            self._arrivals = None
            self._may_overlap = not has_shared

    def _end(self) -> None:
        self._is_running = self._is_reducing = False
        self._next = 0
        for bucket in self._buckets:
            bucket.reset()

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
        device = self.flats[0].parameters_F.device
        zero = torch.zeros((), device=device)
        mine_B = torch.stack([(b.has_nonfinite if b.has_nonfinite is not None else zero).float() for b in self._buckets])
        flags_RB = torch.ones(self.axis.size, len(self._buckets), device=device)
        if self.axis.size > 1:
            comm.all_gather_into_tensor(flags_RB.view(-1), mine_B, group=self.axis.group)
        origin: dict[str, list[int]] = {}
        for bucket, flags_R in zip(self._buckets, flags_RB.unbind(1), strict=True):
            ranks = [rank for rank, flag in zip(self.axis.ranks, flags_R.tolist(), strict=True) if flag > 0]
            origin.update((name, ranks) for name in bucket.nonfinite_names())
        return origin

    def _require_members(self) -> None:
        if self._is_removed:
            raise UsageError(
                "this engine no longer owns its parameters: another deepspeed.initialize() wrapped all or some of them. "
                "Use the newer engine, or give the two engines models that share no parameter."
            )

    def remove(self) -> None:
        """Take every hook off and release the flat groups; the reducer is of no more use."""
        self._is_removed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for flat in self.flats:
            flat.release()
