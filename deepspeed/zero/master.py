"""The update: unscale, clip, step, write back and clear, in one walk over the flat buffers.

    one pass                 gradients, master, state --- optimizer.step_in_one_pass(factor) ---> master, state, values
    any other optimizer, for each sub-group
                             gradients ---- x factor, to the state's precision ----> scratch
                             scratch, master, state ---- optimizer.step() ---> master, state
                             master ---- rounded ----> values of the model
    then                     values <---- the shards of the other ranks, where parameters are whole

Our optimizers in host memory take one pass: one native call does for all slices what the three lines after it do, each
element read and written once. For others a sub-group is small enough to stay in the last-level cache, so that the lines cost
one trip to memory although each is a torch call. Where the gradient needs no conversion (full precision, factor 1) the
sub-group is everything: one call of the optimizer's fused kernel on views, without scratch.

The torch optimizer never sees the model's parameters: its groups hold *slices* of this rank's master, ranges of its shard
space. An optimizer whose update is not element-wise (`optim.is_elementwise`) gets one slice per parameter, in its shape,
all of them in one call, and gives the same numbers as on the parameters themselves; one that only needs sums over
whole parameters (`needs_parameter_sums`) gets this rank's part of each and adds up over the ranks itself.

[Note: wide] Masters of 16 bits with state in fp32 (`state_dtype`): a slice is then an fp32 copy of its range that exists
while it is stepped, in scratch, and is rounded once into the master; one pass reads and rounds the master itself. Between
updates its parameter shows zeros and has no memory.

What does not live here: the mean over ranks (`zero.reducer`), the value of the factor (`zero.optimizer`), how slices are
grouped and where their scratch is (`zero.walk`).

Source: ZeRO-Infinity (arXiv:2104.07857), section 5.2.2 for the walk over sub-groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from deepspeed.common.calls import Calls
from deepspeed.offload.sub_groups import whole_grains
from deepspeed.ops.adam.base import FusedKernelAdam
from deepspeed.ops.host_step import Update
from deepspeed.ops.optimizer import GroupOptimizer
from deepspeed.ops.sums import OwnSums
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.parameter_sums import ShardedSums, WholeSums
from deepspeed.zero.residence import InMemory, Residence
from deepspeed.zero.walk import Batch, Scratch, Slice, batched

__all__ = ["BESIDE", "SUB_GROUP_NUMEL", "MasterWeights", "Slice", "fitting_numel"]

BESIDE = "zenflow_"
"""How the names of a schedule's own state begin (`MasterWeights.kept_beside`)."""

SUB_GROUP_NUMEL = {"cpu": 1 << 19}
"""Elements of one sub-group by device type: on CPU what a core's share of the cache holds (`benchmarks/step_walk.py`)."""

_DEVICE_SUB_GROUP_NUMEL = 1 << 26  # elsewhere the scratch is what counts: 256 MiB of fp32
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def fitting_numel(device: torch.device) -> int:
    """Most elements of one sub-group that suit a device."""
    return SUB_GROUP_NUMEL.get(device.type, _DEVICE_SUB_GROUP_NUMEL)


class MasterWeights:
    """The optimizer's view of the flat groups, and the walk that updates them.

    Re-points every `optimizer.param_groups[i]["params"]` at slices of the flat groups with `group_index` i.

    Args:
        flats: trained flat groups with their gradient stores attached.
        optimizer: a torch optimizer over the model's parameters; its step is called here and nowhere else.
        is_elementwise: whether slices may cut and join parameters.
        sub_group_numel: most elements of one call of an element-wise optimizer (`sub_group_size`); None: all. With scratch
            never more than suits the device.
        state_dtype: what an optimizer of 16-bit masters computes in and keeps its state in; None: as the masters, or as
            the optimizer itself chooses. Wider masters are stepped as they are.
        residence: where masters and state rest between updates; None: in memory.
        whole_axis: the ranks that hold all shards, experts' included; None: the shard axis of the first group.
        parts_axis: the ranks that hold all parts of what tensor-parallel ranks hold in parts; None: nothing is.
        counts: whether a whole group counts on this rank in sums over `whole_axis`, where ranks of it hold the same.
    """

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        optimizer: Optimizer,
        *,
        is_elementwise: bool,
        sub_group_numel: int | None = None,
        state_dtype: torch.dtype | None = None,
        residence: Residence | None = None,
        whole_axis: AxisGroup | None = None,
        parts_axis: AxisGroup | None = None,
        counts: Callable[[FlatGroup], bool] | None = None,
    ) -> None:
        self.flats = tuple(flats)
        self.optimizer = optimizer
        self.residence: Residence = residence or InMemory()
        self.is_elementwise = is_elementwise
        self.before_change = Calls()  # before masters or state are changed or moved
        self._apply: Callable[[], Any] = optimizer.step
        self._client_params = [list(group["params"]) for group in optimizer.param_groups]
        self._state_dtype = state_dtype
        self._whole_axis = whole_axis
        self._counts = counts
        self._parts_axis = parts_axis
        device = flats[0].master_device if flats else torch.device("cpu")
        fitting = fitting_numel(device)
        numel = fitting if sub_group_numel is None else whole_grains(min(fitting, sub_group_numel))
        if self.residence.most_numel is not None:  # it lays its own batches out
            numel = sub_group_numel = self.residence.most_numel
        self.slices = tuple(s for flat in flats for s in self._cut(flat, numel))
        groups = len(optimizer.param_groups)
        # An optimizer that is not element-wise steps once per update: it may count its calls or look at whole groups.
        self._calls = batched(self.slices, sub_group_numel if is_elementwise else None, groups)
        self._sub_groups = self._calls
        if self.residence.most_numel is None:
            self._sub_groups = batched(self.slices, numel if is_elementwise else None, groups)
        self._scaled = Scratch(self._sub_groups, device)
        self._wide = Scratch(self._sub_groups, device)
        self._is_any_wide = any(s.is_wide for s in self.slices)
        self._teach_optimizer()
        self._show(batched(self.slices, None, groups))
        self.residence.attach(self._calls, optimizer)

    # -- what the optimizer sees --------------------------------------------------------------------------------------

    def _cut(self, flat: FlatGroup, numel: int) -> Iterator[Slice]:
        if self.is_elementwise:
            for extent in flat.extents:
                for start in range(extent.start, extent.stop, numel):
                    yield Slice.of(flat, start, min(start + numel, extent.stop), None, self._state_dtype)
        else:
            for position, slot in enumerate(flat.layout.slots):
                for f in flat.own_parts(position):
                    shape = flat.shapes[slot.index] if f.numel == slot.numel else None
                    yield Slice.of(flat, f.buffer_start, f.buffer_start + f.numel, shape, self._state_dtype)

    def _teach_optimizer(self) -> None:
        if isinstance(self.optimizer, GroupOptimizer):
            self.optimizer.state_dtype = self._state_dtype
        is_cut = any(flat.axis.size > 1 or flat.kind.is_part for flat in self.flats)
        if not self.flats or not getattr(self.optimizer, "needs_parameter_sums", False):
            return
        whole_axis = self._whole_axis or self.flats[0].axis
        if is_cut:
            self.optimizer.sums = ShardedSums(  # type: ignore[attr-defined]
                self.slices, self.flats, whole_axis, self._parts_axis
            )
        elif self._counts is not None:
            counted = [s.param for s in self.slices if self._counts(s.flat)]
            self.optimizer.sums = WholeSums(counted, whole_axis, self.flats[0].values.device)  # type: ignore[attr-defined]

    def _show(self, batches: Sequence[Batch]) -> None:
        """Let the optimizer see exactly `batches`."""
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = _Shown((p for batch in batches for p in batch.shown[index]), self.before_change)

    def unshow(self) -> None:
        """Let the optimizer see the model's parameters again: the walk is over for good."""
        for group, params in zip(self.optimizer.param_groups, self._client_params, strict=True):
            group["params"] = params
        if isinstance(self.optimizer, GroupOptimizer):
            self.optimizer.state_dtype = None
        if getattr(self.optimizer, "needs_parameter_sums", False):
            self.optimizer.sums = OwnSums()  # type: ignore[attr-defined]

    # -- what a schedule adds (`zero.zenflow`) ------------------------------------------------------------------------

    def state_of(self, s: Slice) -> dict[str, Any]:
        """The optimizer's state of one slice, for whoever reads or edits it between updates; empty before the first."""
        state: dict[str, Any] = self.optimizer.state.get(s.param, {})
        return state

    def kept_beside(self, s: Slice) -> dict[str, Any]:
        """What a checkpoint keeps of one slice beside the optimizer's state, under names that begin with `BESIDE`."""
        return {}

    def adopt_beside(self, beside: Mapping[Slice, Mapping[str, Any]]) -> None:
        """Take what `kept_beside` gave when the checkpoint that was just loaded was saved. All ranks call it."""

    def adopt_edits(self) -> None:
        """Take over what the caller did to whole parameters, the same on all ranks: `FlatGroup.adopt_edits`.

        Before whatever looks at all masters: an update, a save.
        """
        found = [(flat, edited) for flat in self.flats if (edited := flat.edited())]
        if found:
            with self.residence.agreeing():
                for flat, edited in found:
                    self._adopt(flat, edited)

    def adopt_edit(self, flat: FlatGroup, position: int) -> None:
        """The same for the parameter at `position` of `flat` alone; no other rank is asked."""
        if flat.is_edited(position):
            self._adopt(flat, [position])

    def adopt_all(self) -> None:
        """Take over whatever the model's values are now, whether or not an edit was noticed: `FlatGroup.adopt_all`."""
        self.before_change()
        for flat in self.flats:
            flat.adopt_all()

    def _adopt(self, flat: FlatGroup, edited: Sequence[int]) -> None:
        self.before_change()
        flat.adopt_edits(edited)

    def drain(self) -> None:
        """Bring what still goes on behind training into the model. Collective over the shard axis."""

    def close(self) -> None:
        """End what goes on behind training; state is then the optimizer's own."""

    # -- the update ---------------------------------------------------------------------------------------------------

    @property
    def can_skip_on_device(self) -> bool:
        """Whether `step` obeys `found_inf`: the fused kernels do."""
        if isinstance(self.optimizer, FusedKernelAdam):
            return True
        if type(self.optimizer) is SGD and any(group["momentum"] != 0 for group in self.optimizer.param_groups):
            return False  # torch allocates the momentum, and keeps it unwritten, when the very first step is skipped
        has_kernel = type(self.optimizer) in (SGD, Adam, AdamW, Adagrad)
        return has_kernel and all(group["fused"] for group in self.optimizer.param_groups)

    def step(self, factor: float | Tensor, found_inf: Tensor | None = None) -> None:
        """Update with gradients times `factor`; then the model holds the rounded master. Collective over the shard axis.

        Args:
            factor: a number, or 0-d on the device.
            found_inf: 0-d, 1 leaves weights and state as they are, 0 does not; only with `can_skip_on_device`.
        """
        assert found_inf is None or self.can_skip_on_device  # zero.optimizer asks first
        if (ours := self._takes_one_pass()) is not None:
            self._step_in_one_pass(ours, float(factor), is_skipped=found_inf is not None and bool(found_inf))
            return
        is_one = not isinstance(factor, Tensor) and factor == 1.0
        batches = self._sub_groups if self._needs_scratch(is_one) else self._calls
        with self._skipping(found_inf), self.rewriting(), self.residence.agreeing():
            for batch in self.residence.walk(batches):
                self._load(batch, None if is_one else factor)
                if len(batches) > 1:
                    self._show([batch])
                self._apply()
                self._unload(batch)
            if len(batches) > 1:
                self._show(batches)

    def _takes_one_pass(self) -> GroupOptimizer | None:
        """The optimizer, where it updates masters, states and values in one trip to memory."""
        if not isinstance(self.optimizer, GroupOptimizer) or not self.slices:
            return None
        dtypes = {dtype for f in self.flats for dtype in (f.kind.master_dtype, f.kind.param_dtype, f.gradients.dtype)}
        device = self.slices[0].master.device
        return self.optimizer if self.optimizer.can_step_in_one_pass(device, *dtypes) else None

    def _step_in_one_pass(self, optimizer: GroupOptimizer, factor: float, *, is_skipped: bool) -> None:
        with self.rewriting(), self.residence.agreeing():
            for batch in self._calls if is_skipped else self.residence.walk(self._calls):
                if not is_skipped:
                    self._step_batch(optimizer, batch, factor)
                    continue
                for s in batch.slices:
                    s.flat.gradients.spend(s.start, s.stop)

    def _step_batch(self, optimizer: GroupOptimizer, batch: Batch, factor: float) -> None:
        """Update one batch that is at hand, in one pass."""
        optimizer.step_in_one_pass([_update(s) for s in batch.slices], factor)
        _deliver(batch)
        for s in batch.slices:
            if not s.flat.gradients.spends_with_zeros:
                s.flat.gradients.spend(s.start, s.stop)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Write masters and values inside; afterwards whole parameters hold every rank's part. All ranks enter it."""
        with ExitStack() as stack:
            for flat in self.flats:
                stack.enter_context(flat.rewriting())
            yield
        works = [work for flat in self.flats for work in flat.gather_whole()]
        for work in works:
            work.wait()
        for flat in self.flats:
            flat.reopen()

    @contextmanager
    def _skipping(self, found_inf: Tensor | None) -> Iterator[None]:
        if found_inf is None:
            yield
            return
        self.optimizer.found_inf = found_inf.to(torch.float32)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del self.optimizer.found_inf  # type: ignore[attr-defined]

    def _needs_scratch(self, is_one: bool) -> bool:
        return not is_one or self._is_any_wide or any(f.gradients.dtype != f.kind.master_dtype for f in self.flats)

    def _load(self, batch: Batch, factor: float | Tensor | None) -> None:
        """Give each slice its gradient, times `factor` (None: 1) and in its own precision, and wide ones their values."""
        targets, sources = [], []
        for s, scaled in zip(batch.slices, self._scaled.views(batch), strict=True):
            grad = s.flat.gradients.shard(s.start, s.stop)
            if factor is not None or grad.dtype != s.param.dtype:
                targets.append(scaled)
                sources.append(grad)
                grad = scaled
            s.param.grad = grad if s.param.dim() == 1 else grad.view(s.param.shape)
        _scale(targets, sources, factor)
        for s, wide in zip(batch.slices, self._wide.views(batch) if self._is_any_wide else (), strict=False):
            if s.is_wide:
                s.param.data = wide.copy_(s.master).view(s.param.shape)

    def _unload(self, batch: Batch) -> None:
        """Round what was stepped into masters and values; gradients are spent."""
        targets, sources = [], []
        for s in batch.slices:
            s.param.grad = None
            if s.placeholder is not None:
                s.master.copy_(s.param.data.view(-1))
                s.param.data = s.placeholder
            if s.values is not None and s.values is not s.master:
                targets.append(s.values)
                sources.append(s.master)
        if targets:
            torch._foreach_copy_(targets, sources)
        _deliver(batch)
        for s in batch.slices:
            s.flat.gradients.spend(s.start, s.stop)


class _Shown(list[nn.Parameter]):
    """The parameters of one of the optimizer's groups. Whoever takes one may write to it, through `.data` too: asks first.

    Args:
        params: of the group.
        before_change: `MasterWeights.before_change`.
    """

    def __init__(self, params: Iterable[nn.Parameter], before_change: Callable[[], None]) -> None:
        super().__init__(params)
        self._before_change = before_change

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._before_change()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._before_change()
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[type, tuple[list[nn.Parameter]]]:
        """A copy is a list as any other."""
        return list, ([*self],)


def _deliver(batch: Batch) -> None:
    """Bring what was stepped to values that rest elsewhere."""
    for s in batch.slices:
        if s.values is None:
            s.flat.deliver_values(s.start, s.stop, s.master)


def _update(s: Slice) -> Update:
    grad = s.flat.gradients.shard(s.start, s.stop)
    values = None if s.values is s.master else s.values
    return Update(s.param, s.master, grad, values, clears_grad=s.flat.gradients.spends_with_zeros)


def _scale(targets: list[Tensor], sources: list[Tensor], factor: float | Tensor | None) -> None:
    """Let targets be sources x factor (None: 1), rounded once from their own precision, or fp32 where that is more."""
    if factor is not None and any(target.dtype in _LOW_PRECISION for target in targets):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)).mul(factor))
    elif len(targets) == 1 and factor is not None and targets[0].dtype == sources[0].dtype:
        torch.mul(sources[0], factor, out=targets[0])  # one pass
    elif targets:
        torch._foreach_copy_(targets, sources)
        if factor is not None:
            torch._foreach_mul_(targets, factor)
