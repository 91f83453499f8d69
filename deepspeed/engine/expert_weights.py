"""The whole values of a model whose experts are spread over ranks, one after the other, on the rank that writes them.

    rank 0      dense entries | stacked experts    | own experts | experts of 1 | ...     for each element size, falling
    rank 1      dense entries | its part --send--> | own experts --send--> rank 0

Ranks that hold copies of experts help to gather them where they are sharded; those beside rank 0 send.

Does not live here: entries of one rank (`whole_weights`), stacked experts (`cut_weights`), stages of a pipeline
(`stage_weights`), what becomes of the values (`whole_model`, which calls this).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint.export.model_file import ModelEntry
from deepspeed.engine.cut_weights import CutWeights
from deepspeed.engine.sent_weights import receive_value, send_value
from deepspeed.engine.whole_weights import WholeWeights
from deepspeed.topology.mesh import AxisGroup

__all__ = ["ExpertWeights"]


class ExpertWeights:
    """What the state dicts of all expert-parallel ranks hold together. Constructing it is collective over them.

    Args:
        dense: what all of them hold.
        stacked: what each holds a part of.
        experts: of this rank's experts.
        axis: the expert-parallel ranks.
        device: where messages are received.

    Attributes:
        entries: see `WholeWeights`; in the order of `values` on the first rank.
        others: likewise.
        metadata: likewise.
    """

    def __init__(
        self,
        dense: WholeWeights | CutWeights,
        stacked: CutWeights,
        experts: WholeWeights | CutWeights,
        axis: AxisGroup,
        device: torch.device,
    ) -> None:
        self._dense = dense
        self._stacked = stacked
        self._experts = experts
        self._axis = axis
        self._device = device
        told: list[Any] = [None] * axis.size
        comm.all_gather_object(told, (experts.entries, experts.others, experts.metadata), group=axis.group)
        self._of_ranks: list[list[ModelEntry]] = [entries for entries, _, _ in told]
        self.others: dict[str, Any] = dict(dense.others)
        of_modules: dict[str, Any] = dict(dense.metadata or {})
        for _, others, metadata in told:
            self.others.update(others)
            of_modules.update(metadata or {})
        self.metadata: Mapping[str, Any] | None = of_modules or None
        every = [dense.entries, stacked.entries, *self._of_ranks]
        self._sizes = sorted({entry.dtype.itemsize for entries in every for entry in entries}, reverse=True)
        self.entries = [entry for nbytes in self._sizes for entries in every for entry in _sized(entries, nbytes)]

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """(First name, whole value) of each entry, on the first rank; on others of what they hold.

        All ranks go through it to its end. Blocks on the other ranks, one tensor after the other.
        """
        axis = self._axis
        is_beside_first = axis.ranks[0] == 0
        for nbytes in self._sizes:
            yield from self._dense.values_of(nbytes)
            yield from self._stacked.values_of(nbytes)
            for name, value in self._experts.values_of(nbytes):
                yield name, value
                if is_beside_first and axis.rank > 0:
                    send_value(name, value, axis, self._device)
            for place in range(1, axis.size) if is_beside_first and axis.rank == 0 else ():
                for entry in _sized(self._of_ranks[place], nbytes):
                    yield entry.names[0], receive_value(entry, place, axis, self._device)


def _sized(entries: Sequence[ModelEntry], item_nbytes: int) -> Iterator[ModelEntry]:
    yield from (entry for entry in entries if entry.dtype.itemsize == item_nbytes)
