"""One whole value after the other, from a rank that holds it to the first of an axis, which writes them all.

Does not live here: in which order (`stage_weights` between stages of a pipeline, `expert_weights` between ranks with other
experts; both call this).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.checkpoint.export.model_file import ModelEntry
from deepspeed.comm.watch import naming
from deepspeed.topology.mesh import AxisGroup

__all__ = ["receive_value", "send_value"]

_TAG = 16  # lines of the pipeline have the first ones


def send_value(name: str, value: Tensor, axis: AxisGroup, device: torch.device) -> None:
    """Send to the first rank of `axis`, which calls `receive_value` for it. Nothing travels where there are no elements."""
    if value.numel():
        with naming(f"weights of {name!r}"):
            comm.send(_bytes_of(value.to(device)), axis.ranks[0], axis.group, _TAG)


def receive_value(entry: ModelEntry, place: int, axis: AxisGroup, device: torch.device) -> Tensor:
    """What the rank at `place` of `axis` sends, in memory of its own on `device`."""
    value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    if value.numel():
        with naming(f"weights of {entry.names[0]!r}"):
            comm.recv(_bytes_of(value), axis.ranks[place], axis.group, _TAG)
    return value


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor as one row of bytes; a copy where it has gaps."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
