"""Saved inputs in shards over tensor-parallel ranks, which hold the same ones: `partition_activations`.

    whole, on each of 3 ranks     | 0 1 2 3 4 5 6 7 8 9 |
    kept by ranks 0, 1, 2         | 0 1 2 3 |   | 4 5 6 7 |   | 8 9 . . |          . padding
    recomputation                 all-gather, and the padding is cut off

Right only where ranks hold equal values, as between the layers of tensor parallelism without sequence parallelism: a
shard of another rank takes the place of one's own (ZeRO, arXiv:1910.02054, section 6.1). Called by `keeping`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.watch import naming
from deepspeed.topology.mesh import AxisGroup

__all__ = ["TensorShards"]


class TensorShards:
    """Cuts and joins over one axis; of size 1 it does nothing.

    Args:
        axis: the tensor-parallel ranks.
    """

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis

    def cuts(self, tensor: Tensor) -> bool:
        """Whether this tensor is kept in shards: floating-point values, enough for a part on most ranks."""
        return self._axis.size > 1 and tensor.is_floating_point() and tensor.numel() >= self._axis.size

    def own(self, flat_F: Tensor) -> Tensor:
        """This rank's shard of `flat_F`, ceil(F / ranks) elements; a view, but for last ranks, whose shards are padded."""
        shard_numel = -(-flat_F.numel() // self._axis.size)
        begin = min(self._axis.rank * shard_numel, flat_F.numel())
        shard_S = flat_F[begin : begin + shard_numel]
        missing = shard_numel - shard_S.numel()
        return shard_S if missing == 0 else torch.cat([shard_S, shard_S.new_zeros(missing)])

    def whole(self, shard_S: Tensor, numel: int) -> Tensor:
        """Inverse of `own`; all ranks of the axis call it, in the same order."""
        gathered = shard_S.new_empty(self._axis.size * shard_S.numel())
        with naming("activations kept in shards (partition_activations)"):
            comm.all_gather_into_tensor(gathered, shard_S, group=self._axis.group)
        return gathered[:numel]
