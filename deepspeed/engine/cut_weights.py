"""Whole values of tensors of which each rank of an axis holds a part, one after the other, on the first rank.

    rank 0      its part | receive that of 1 | receive that of 2 | ...  --> the whole in host memory, the next tensor
    rank 1      its part --send--> rank 0

Does not live here: this rank's values (`whole_weights`), who holds what (`cuts`). Called by `whole_model`, `expert_weights`
and `stage_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepspeed.checkpoint.export.model_file import ModelEntry
from deepspeed.engine.cuts import Cuts
from deepspeed.engine.sent_weights import receive_value, send_value
from deepspeed.engine.whole_weights import WholeWeights
from deepspeed.sharding import Cut
from deepspeed.topology.mesh import AxisGroup

if TYPE_CHECKING:
    from deepspeed.engine.parts import EngineParts

__all__ = ["CutWeights", "expert_parts_together", "parts_together"]


def parts_together(own: WholeWeights, parts: EngineParts) -> WholeWeights | CutWeights:
    """`own`, with the parts of tensor-parallel ranks brought together on the first of those whose copy is written."""
    mesh = parts.mesh
    if mesh.axis("tensor").size == 1:
        return own
    return CutWeights(own, parts.cuts, mesh.axis("tensor"), parts.device, is_sent=mesh.zero_group.rank == 0)


def expert_parts_together(own: WholeWeights, parts: EngineParts) -> WholeWeights | CutWeights:
    """The same for experts that are spread over ranks: on the first tensor-parallel rank beside each of rank 0's fellows."""
    tensor, experts = parts.mesh.axis("tensor"), parts.mesh.axis("expert")
    if tensor.size == 1:
        return own
    first_beside = experts.ranks[0] - tensor.ranks[tensor.rank] + tensor.ranks[0]  # places are sums of those on each axis
    return CutWeights(own, parts.cuts, tensor, parts.device, is_sent=first_beside == 0)


class CutWeights:
    """The entries of a rank's state dict, with what the ranks of an axis hold in parts brought together.

    Args:
        own: this rank's; the same names on all ranks of the axis.
        cuts: of the model.
        axis: the ranks that hold the parts.
        device: where messages are received.
        is_sent: whether this rank's copy of the model is the one that is written; alike on all ranks of `axis`.

    Attributes:
        entries: see `WholeWeights`.
        others: likewise.
        metadata: likewise.
    """

    def __init__(self, own: WholeWeights, cuts: Cuts, axis: AxisGroup, device: torch.device, *, is_sent: bool) -> None:
        self._own = own
        self._cuts = cuts
        self._axis = axis
        self._device = device
        self._is_sent = is_sent
        self._of_first_name = {entry.names[0]: entry for entry in own.entries}
        self.entries = [entry._replace(shape=cuts.shape(entry.names[0], entry.shape)) for entry in own.entries]
        self.others = own.others
        self.metadata = own.metadata

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """(First name, whole value) of each entry, on the first rank of the axis; on others of what they hold.

        All ranks go through it to its end. Blocks on ranks beside the first, one tensor after the other.
        """
        for nbytes in self._own.item_sizes():
            yield from self.values_of(nbytes)

    def values_of(self, item_nbytes: int) -> Iterator[tuple[str, Tensor]]:
        """Those of `values` with elements of this size."""
        for name, value in self._own.values_of(item_nbytes):
            if name not in self._cuts or not self._is_sent:
                yield name, value
            elif self._axis.rank == 0:
                yield name, self._joined(value, self._of_first_name[name])
            else:
                send_value(name, value, self._axis, self._device)
                yield name, value

    def _joined(self, value: Tensor, entry: ModelEntry) -> Tensor:
        cut = self._cuts.parts_of(entry.names[0])
        whole = torch.empty(cut.shape, dtype=value.dtype)
        _place(value, cut, 0, whole)
        for rank in range(1, self._axis.size):
            part = entry._replace(shape=cut.part_shape(rank))
            _place(receive_value(part, rank, self._axis, self._device), cut, rank, whole)
        return whole


def _place(part: Tensor, cut: Cut, rank: int, whole: Tensor) -> None:
    at = 0
    for span in cut.parts[rank]:
        whole.narrow(cut.dim, span.start, span.length).copy_(part.narrow(cut.dim, at, span.length))
        at += span.length
