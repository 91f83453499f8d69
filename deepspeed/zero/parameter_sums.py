"""Sums over whole parameters when each rank steps parts of them: one all-reduce of one row per parameter.

Experts that other ranks hold others in the place of have an all-reduce of their own, over their own shard axis, and
parameters that tensor-parallel ranks hold in parts one over the ranks that hold all parts.

    own parts   rows of p1, p3 --+                                           +--> rows of p1, p3
                                 +--> [p0|p1|p2|p3|...] x K --all-reduce--> -+
    others      rows of p0, p3 --+    zero where a rank holds nothing

Lives here: where each part's row is. Does not live here: what is summed (`ops.lamb`, through `ops.sums`), the parts
(`zero.master`, which makes this).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.ops.sums import OwnSums
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.walk import Slice

__all__ = ["ShardedSums", "WholeSums"]


class ShardedSums:
    """The protocol `ops.sums.ParameterSums` over the shard axis.

    Args:
        slices: this rank's parts, each of one parameter.
        flats: the flat groups they belong to; the same on all ranks, at least one.
        whole_axis: the ranks that hold all shards of all groups.
        parts_axis: the ranks that hold all parts of parameters that are parts (`Kind.is_part`).
    """

    def __init__(
        self, slices: Sequence[Slice], flats: Sequence[FlatGroup], whole_axis: AxisGroup, parts_axis: AxisGroup | None
    ) -> None:
        self._whole_axis = whole_axis
        axis_of = {id(flat): flat.axis if parts_axis is None or not flat.kind.is_part else parts_axis for flat in flats}
        self._device = flats[0].values.device
        first_rows: dict[int, int] = {}
        self._parameters = 0
        self._rows_of: list[tuple[AxisGroup, slice]] = []
        for axis in dict.fromkeys(axis_of[id(flat)] for flat in flats):
            begin = self._parameters
            for flat in flats:
                if axis_of[id(flat)] is axis:
                    first_rows[id(flat)] = self._parameters
                    self._parameters += len(flat.members)
            self._rows_of.append((axis, slice(begin, self._parameters)))
        self._rows = {
            id(s.param): first_rows[id(s.flat)] + next(s.flat.own_fragments(s.start, s.stop)).index for s in slices
        }
        self._indices: tuple[tuple[int, ...], Tensor] | None = None

    def per_parameter(self, parts: Sequence[Tensor], partial_PK: Tensor) -> Tensor:
        """See `ops.sums.ParameterSums`."""
        index = self._index(parts)
        rows_AK = torch.zeros(self._parameters, partial_PK.shape[1], dtype=partial_PK.dtype, device=self._device)
        rows_AK.index_copy_(0, index, partial_PK.to(self._device))
        for axis, rows in self._rows_of:
            if axis.size > 1:
                comm.all_reduce(rows_AK[rows], group=axis.group)
        return rows_AK.index_select(0, index)

    def counts(self, part: Tensor) -> bool:
        """See `ops.sums.ParameterSums`: every shard is on one rank."""
        return True

    def of_all(self, partial_K: Tensor) -> Tensor:
        """See `ops.sums.ParameterSums`."""
        total = partial_K.to(self._device)
        comm.all_reduce(total, group=self._whole_axis.group)
        return total

    def _index(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows of `parts`; remembered, because they are the same at every step."""
        key = tuple(map(id, parts))
        if self._indices is None or self._indices[0] != key:
            rows = torch.tensor([self._rows[each] for each in key], dtype=torch.int64, device=self._device)
            self._indices = (key, rows)
        return self._indices[1]


class WholeSums(OwnSums):
    """The same where every rank has whole parameters, and others have others beside them: experts at stage 0.

    Args:
        counted: those that count on this rank.
        whole_axis: the ranks that hold all.
        device: where its back end wants tensors.
    """

    def __init__(self, counted: Iterable[Tensor], whole_axis: AxisGroup, device: torch.device) -> None:
        self._counted = {id(part) for part in counted}
        self._whole_axis = whole_axis
        self._device = device

    def counts(self, part: Tensor) -> bool:
        """See `ops.sums.ParameterSums`."""
        return id(part) in self._counted

    def of_all(self, partial_K: Tensor) -> Tensor:
        """See `ops.sums.ParameterSums`."""
        total = partial_K.to(self._device, copy=True)
        comm.all_reduce(total, group=self._whole_axis.group)
        return total
