"""Whole values of tensors of which each expert-parallel rank holds a stretch, one after the other, on the first rank.

    rank 0      experts 0, 1 | receive 2, 3 | receive 4, 5 | ...  --> gate_up_proj (8, 2I, M) in host memory, the next tensor
    rank 1      experts 2, 3 --send--> rank 0

Does not live here: this rank's values (`whole_weights`), where stretches lie (`stretches`). `expert_weights` calls this.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepspeed.checkpoint.export.model_file import ModelEntry
from deepspeed.engine.sent_weights import receive_value, send_value
from deepspeed.engine.stretches import Stretches
from deepspeed.engine.whole_weights import WholeWeights
from deepspeed.topology.mesh import AxisGroup

__all__ = ["StackedWeights"]


class StackedWeights:
    """Such entries of all expert-parallel ranks.

    Args:
        own: this rank's stretches, alike on all ranks.
        stretches: where they lie.
        axis: the expert-parallel ranks.
        device: where messages are received.

    Attributes:
        entries: of the whole tensors, in the order of `values_of`.
    """

    def __init__(self, own: WholeWeights, stretches: Stretches, axis: AxisGroup, device: torch.device) -> None:
        self._own = own
        self._of_first_name = {entry.names[0]: entry for entry in own.entries}
        self._axis = axis
        self._device = device
        self.entries = [entry._replace(shape=stretches.of(entry.names[0], entry.shape).shape) for entry in own.entries]

    def values_of(self, item_nbytes: int) -> Iterator[tuple[str, Tensor]]:
        """(First name, whole value) of those with elements of this size, on the first rank; on others of what they hold.

        All ranks go through it to its end. Blocks on ranks beside the first, one tensor after the other.
        """
        is_beside_first = self._axis.ranks[0] == 0
        for name, value in self._own.values_of(item_nbytes):
            if is_beside_first and self._axis.rank == 0:
                yield name, self._joined(value, self._of_first_name[name])
                continue
            if is_beside_first:
                send_value(name, value, self._axis, self._device)
            yield name, value

    def _joined(self, value: Tensor, entry: ModelEntry) -> Tensor:
        parts = [value.cpu()]
        parts += [receive_value(entry, place, self._axis, self._device).cpu() for place in range(1, self._axis.size)]
        return torch.cat(parts)
