"""The whole values of a pipeline's model, one after the other, on the rank that writes them.

Ranks that hold other experts of a stage are as other stages here. Parts of tensor-parallel ranks are brought together on the
first of a stage (`cut_weights`) before they travel.

    entries    stage 0: [a 4 bytes, b 2]   stage 1: [c 4, d 2]       every stage learns of all
    values     a, c, b, d                                            by falling element size, then by stage
    stage 1    c --send--> rank 0 --> yield                          one tensor at a time

Does not live here: what a stage's own state dict holds (`whole_weights`), which names belong to an earlier stage (`stage`),
the file (`whole_model`, which calls this).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint.export.model_file import ModelEntry
from deepspeed.engine.cut_weights import CutWeights
from deepspeed.engine.sent_weights import receive_value, send_value
from deepspeed.engine.whole_weights import WholeWeights
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["StageWeights"]


class StageWeights:
    """What the state dicts of all stages hold together. Constructing it is collective over the stages.

    Args:
        own: of this stage, without what an earlier stage has.
        mesh: of the ranks; one of those that hold the same, or parts of the same, takes part, other ranks have no entries
            and no values.
        device: where messages are received.

    Attributes:
        entries: see `WholeWeights`.
        others: likewise.
        metadata: likewise.
    """

    def __init__(self, own: WholeWeights | CutWeights, mesh: ParallelMesh, device: torch.device) -> None:
        self._own = own
        self._pipe = mesh.pipe_expert
        self._device = device
        self._stages: list[list[ModelEntry]] = []
        self.entries: list[ModelEntry] = []
        self.others: dict[str, Any] = {}
        self.metadata: Mapping[str, Any] | None = None
        self._takes_part = mesh.expert_zero_group.rank == 0 and mesh.axis("tensor").rank == 0
        if not self._takes_part:
            return
        told: list[Any] = [(own.entries, own.others, own.metadata)]
        if self._pipe.size > 1:
            told = [None] * self._pipe.size
            comm.all_gather_object(told, (own.entries, own.others, own.metadata), group=self._pipe.group)
        self._stages = [entries for entries, _, _ in told]
        self.entries = [entry for _, entry in self._in_order()]
        self.others = {name: value for _, others, _ in reversed(told) for name, value in others.items()}
        self.metadata = {
            name: value for _, _, metadata in reversed(told) for name, value in (metadata or {}).items()
        } or None

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """(First name, whole value) of each entry, on the first stage; nothing on the others, which send theirs.

        All ranks go through it to its end. Blocks on the other stages, one tensor after the other.
        """
        own = self._own.values()
        if not self._takes_part:
            for _ in own:  # parts are sent on the way
                pass
            return
        for stage, entry in self._in_order():
            name = entry.names[0]
            if stage == self._pipe.rank:
                value = next(own)[1]
                if stage == 0:
                    yield name, value
                else:
                    send_value(name, value, self._pipe, self._device)
            elif self._pipe.rank == 0:
                yield name, receive_value(entry, stage, self._pipe, self._device)

    def _in_order(self) -> Iterator[tuple[int, ModelEntry]]:
        """Stage and entry, by falling element size: each stage's own order is that, too."""
        sizes = {entry.dtype.itemsize for entries in self._stages for entry in entries}
        for nbytes in sorted(sizes, reverse=True):
            for stage, entries in enumerate(self._stages):
                yield from ((stage, entry) for entry in entries if entry.dtype.itemsize == nbytes)
