"""The update: unscale, clip, step, write back and clear, in one walk over the flat buffers.

    for each sub-group       gradients ---- x factor, to full precision ----> scratch
                             scratch, master, state ---- optimizer.step() ---> master, state
                             master ---- rounded ----> values of the model
    then                     values <---- the shards of the other ranks, where parameters are whole

A sub-group is small enough to stay in the last-level cache, so the four lines cost one trip to memory although each is a
torch call. Where the gradient needs no conversion (full precision, factor 1) the sub-group is everything: one call of the
optimizer's fused kernel on views, without scratch.

The torch optimizer never sees the model's parameters: its groups hold *slices* of this rank's master, ranges of its shard
space. An optimizer whose update is not element-wise (`optim.is_elementwise`) gets one slice per parameter, in its shape,
all of them in one call, and gives the same numbers as on the parameters themselves; one that only needs sums over
whole parameters (`needs_parameter_sums`) gets this rank's part of each and adds up over the ranks itself.

What does not live here: the mean over ranks (`zero.reducer`), the value of the factor (`zero.optimizer`).

Source: ZeRO-Infinity (arXiv:2104.07857), section 5.2.2 for the walk over sub-groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.zero.flat import FlatGroup, NamedParameter

SUB_GROUP_NUMEL = {"cpu": 1 << 19}
"""Elements of one sub-group by device type: on CPU what a core's share of the cache holds (`benchmarks/step_walk.py`)."""

_DEVICE_SUB_GROUP_NUMEL = 1 << 26  # elsewhere the scratch is what counts: 256 MiB of fp32


@dataclass(frozen=True)
class Slice:
    """Elements `[start, stop)` of a flat group's shard space, as one parameter of the torch optimizer."""

    flat: FlatGroup
    start: int
    stop: int
    param: nn.Parameter

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    def pieces(self) -> Iterator[tuple[NamedParameter, int, int, int]]:
        """(parameter, first element of it, first element of this slice, elements) for everything in the slice."""
        for f in self.flat.own_fragments(self.start, self.stop):
            yield self.flat.members[f.index], f.param_start, f.buffer_start - self.start, f.numel


class MasterWeights:
    """The optimizer's view of the flat groups, and the walk that updates them.

    Re-points every `optimizer.param_groups[i]["params"]` at slices of the flat groups with `group_index` i.

    Args:
        flats: trained flat groups with their gradient stores attached.
        optimizer: a torch optimizer over the model's parameters; its step is called here and nowhere else.
        is_elementwise: whether slices may cut and join parameters.
        sub_group_numel: most elements of a sub-group (`sub_group_size`); never more than suits the device.
    """

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        optimizer: Optimizer,
        *,
        is_elementwise: bool,
        sub_group_numel: int | None = None,
    ) -> None:
        self.flats = tuple(flats)
        self.optimizer = optimizer
        self.is_elementwise = is_elementwise
        self._apply: Callable[[], Any] = optimizer.step
        self._client_params = [list(group["params"]) for group in optimizer.param_groups]
        device = flats[0].values.device if flats else torch.device("cpu")
        fitting = SUB_GROUP_NUMEL.get(device.type, _DEVICE_SUB_GROUP_NUMEL)
        self._sub_group_numel = fitting if sub_group_numel is None else min(fitting, sub_group_numel)
        self.slices = tuple(s for flat in flats for s in self._cut(flat))
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._show(self.slices)

    def _cut(self, flat: FlatGroup) -> Iterator[Slice]:
        if self.is_elementwise:
            for extent in flat.extents:
                for start in range(extent.start, extent.stop, self._sub_group_numel):
                    stop = min(start + self._sub_group_numel, extent.stop)
                    yield Slice(flat, start, stop, nn.Parameter(flat.own_master(start, stop)))
        else:
            for position, slot in enumerate(flat.layout.slots):
                for f in flat.own_parts(position):
                    stop = f.buffer_start + f.numel
                    master = flat.own_master(f.buffer_start, stop)
                    whole = master.view(flat.shapes[slot.index]) if f.numel == slot.numel else master
                    yield Slice(flat, f.buffer_start, stop, nn.Parameter(whole))

    def _show(self, slices: Sequence[Slice]) -> None:
        """Let the optimizer see exactly `slices`."""
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [s.param for s in slices if s.flat.kind.group_index == index]

    @property
    def can_skip_on_device(self) -> bool:
        """Whether `step` obeys `found_inf`."""
        return False

    def step(self, factor: float | Tensor, found_inf: Tensor | None = None) -> None:
        """Update with gradients times `factor`; then the model holds the rounded master. Collective over the shard axis.

        Args:
            factor: a number, or 0-d on the device.
            found_inf: 0-d, 1 leaves everything as it is; only with `can_skip_on_device`.
        """
        assert found_inf is None or self.can_skip_on_device  # zero.optimizer asks first
        with self.rewriting():
            batches = list(self._batches(factor))
            for batch in batches:
                for s, grad in self._gradients(batch, factor):
                    s.param.grad = grad
                if len(batches) > 1:
                    self._show(batch)
                self._apply()
                for s in batch:
                    s.param.grad = None
                    s.flat.write_back(s.start, s.stop)
                    s.flat.gradients.spend(s.start, s.stop)
            if len(batches) > 1:
                self._show(self.slices)

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

    def _batches(self, factor: float | Tensor) -> Iterator[tuple[Slice, ...]]:
        """Slices that are stepped together: all, when no scratch is needed, else as many as the sub-group holds.

        An optimizer that is not element-wise steps once per update: it may count its calls or look at whole groups.
        """
        needs_scratch = not _is_one(factor) or any(flat.gradients.dtype != flat.kind.master_dtype for flat in self.flats)
        if not (needs_scratch and self.is_elementwise):
            yield self.slices
            return
        batch: list[Slice] = []
        numel = 0
        for s in self.slices:
            if batch and numel + s.numel > self._sub_group_numel:
                yield tuple(batch)
                batch, numel = [], 0
            batch.append(s)
            numel += s.numel
        if batch:
            yield tuple(batch)

    def _gradients(self, batch: Sequence[Slice], factor: float | Tensor) -> Iterator[tuple[Slice, Tensor]]:
        wanted = Counter[torch.dtype]()
        for s in batch:
            wanted[s.param.dtype] += s.numel
        used = Counter[torch.dtype]()
        for s in batch:
            grad = s.flat.gradients.shard(s.start, s.stop)
            dtype = s.param.dtype
            if not _is_one(factor) or grad.dtype != dtype:
                begin = used[dtype]
                used[dtype] += s.numel
                scaled = self._scratch_for(dtype, wanted[dtype])[begin : begin + s.numel]
                if grad.dtype == dtype:
                    torch.mul(grad, factor, out=scaled)
                else:
                    scaled.copy_(grad)
                    if not _is_one(factor):
                        scaled.mul_(factor)
                grad = scaled
            yield s, grad.view(s.param.shape)

    def _scratch_for(self, dtype: torch.dtype, numel: int) -> Tensor:
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < numel:
            scratch = self._scratch[dtype] = torch.empty(numel, dtype=dtype, device=self.flats[0].values.device)
        return scratch

    def unshow(self) -> None:
        """Let the optimizer see the model's parameters again: the walk is over for good."""
        for group, params in zip(self.optimizer.param_groups, self._client_params, strict=True):
            group["params"] = params


def _is_one(factor: float | Tensor) -> bool:
    return not isinstance(factor, Tensor) and factor == 1.0
