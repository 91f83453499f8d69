"""What the update walks over: slices of shard space, batches of slices that are stepped together, scratch for a batch.

    shard space   |--- slice 0 ---|--- slice 1 ---|- slice 2 -|     each of them one parameter of the torch optimizer
    batches       |----------- 0 -----------------|----- 1 ---|     one call of the optimizer each
    scratch       | views of 0: s0, s1            |                 the same memory for every batch
                  | views of 1: s2    |

Lives here: the cut and the memory. Does not live here: the update (`zero.master`, the only caller).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepspeed.zero.flat import FlatGroup, NamedParameter

__all__ = ["Batch", "Scratch", "Slice", "batched"]


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements `[start, stop)` of a flat group's shard space, as one parameter of the torch optimizer."""

    flat: FlatGroup
    start: int
    stop: int
    param: nn.Parameter
    """In the precision that the optimizer computes in: a view of `master`, or see `placeholder`."""

    master: Tensor
    """What is updated, 1-D. Where it rests on a tier it has memory only while its batch is at hand (`zero.residence`)."""

    values: Tensor | None
    """The model's values, 1-D: a view, `master` itself, or lent memory (`zero.delivery`). None: they are delivered."""

    placeholder: Tensor | None = None
    """What `param` shows between updates where it is wider than `master`: zeros, of one element's memory."""

    @classmethod
    def of(cls, flat: FlatGroup, start: int, stop: int, shape: torch.Size | None, state_dtype: torch.dtype | None) -> Slice:
        """The slice `[start, stop)`, within one extent, in `shape` (None: 1-D), stepped at least in `state_dtype`."""
        values = flat.values_slot(start, stop)
        master = flat.master_slot(start, stop) if flat.has_own_masters or values is None else values
        shape = master.shape if shape is None else shape
        dtype = master.dtype if state_dtype is None else torch.promote_types(master.dtype, state_dtype)
        if dtype == master.dtype:
            return cls(flat, start, stop, nn.Parameter(master.view(shape)), master, values)
        placeholder = master.new_zeros((), dtype=dtype).expand(shape)
        return cls(flat, start, stop, nn.Parameter(placeholder), master, values, placeholder)

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    @property
    def is_wide(self) -> bool:
        """Whether the optimizer steps a copy in more precision than the master has."""
        return self.placeholder is not None

    def pieces(self) -> Iterator[tuple[NamedParameter, int, int, int]]:
        """(parameter, first element of it, first element of this slice, elements) for everything in the slice."""
        for f in self.flat.own_fragments(self.start, self.stop):
            yield self.flat.members[f.index], f.param_start, f.buffer_start - self.start, f.numel


class Batch:
    """Slices that are stepped together; `shown[i]` are their parameters in the optimizer's group i."""

    def __init__(self, slices: Sequence[Slice], groups: int) -> None:
        self.slices = tuple(slices)
        self.shown: list[list[nn.Parameter]] = [[] for _ in range(groups)]
        for s in slices:
            self.shown[s.flat.kind.group_index].append(s.param)


def batched(slices: Sequence[Slice], most_numel: int | None, groups: int) -> tuple[Batch, ...]:
    """Batches of at most `most_numel` elements (None: all in one), but of one slice at least; one even without slices."""
    batches: list[Batch] = []
    joined: list[Slice] = []
    numel = 0
    for s in slices:
        if joined and most_numel is not None and numel + s.numel > most_numel:
            batches.append(Batch(joined, groups))
            joined, numel = [], 0
        joined.append(s)
        numel += s.numel
    if joined or not batches:  # a rank without any slice still steps: its optimizer may meet the others
        batches.append(Batch(joined, groups))
    return tuple(batches)


class Scratch:
    """One 1-D tensor per slice of a batch, in memory that all batches share; made when it is first asked for."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        self._numels: Counter[torch.dtype] = Counter()
        for batch in batches:
            self._numels |= _numels(batch)
        self._device = device
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._views: dict[int, list[Tensor]] = {}

    def views(self, batch: Batch) -> list[Tensor]:
        """A tensor for each slice of `batch`, in the precision of its `param`; what the previous batch left is in them."""
        views = self._views.get(id(batch))
        if views is None:
            views = self._views[id(batch)] = list(self._laid_out(batch))
        return views

    def _laid_out(self, batch: Batch) -> Iterator[Tensor]:
        used: Counter[torch.dtype] = Counter()
        for s in batch.slices:
            dtype = s.param.dtype
            if dtype not in self._buffers:
                self._buffers[dtype] = torch.empty(self._numels[dtype], dtype=dtype, device=self._device)
            yield self._buffers[dtype][used[dtype] : used[dtype] + s.numel]
            used[dtype] += s.numel


def _numels(batch: Batch) -> Counter[torch.dtype]:
    numels: Counter[torch.dtype] = Counter()
    for s in batch.slices:
        numels[s.param.dtype] += s.numel
    return numels
