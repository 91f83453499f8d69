"""Saved inputs in shards over tensor-parallel ranks, which hold the same ones: `partition_activations`.

    whole, on each of 3 ranks     | 0 1 2 3 4 5 6 7 8 9 |
    kept by ranks 0, 1, 2         | 0 1 2 3 |   | 4 5 6 7 |   | 8 9 . . |          . padding
    recomputation                 all-gather, and the padding is cut off

Right only where ranks hold equal values, as between the layers of tensor parallelism without sequence parallelism: shards
of other ranks take the place of one's own (ZeRO, arXiv:1910.02054, section 6.1). So the first inputs are compared, bit
for bit but for permutations, with one small all-reduce each. Called by `keeping`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.watch import naming
from deepspeed.errors import UsageError
from deepspeed.topology.mesh import AxisGroup

__all__ = ["TensorShards"]

_COMPARED = 64  # inputs: those of a whole forward of most models, once
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorShards:
    """Cuts and joins over one axis; of size 1 it does nothing.

    Args:
        axis: the tensor-parallel ranks.
    """

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self._left_to_compare = _COMPARED

    def cuts(self, tensor: Tensor) -> bool:
        """Whether this tensor is kept in shards: floating-point values, enough for a part on most ranks."""
        return self._axis.size > 1 and tensor.is_floating_point() and tensor.numel() >= self._axis.size

    def compare(self, tensor: Tensor) -> None:
        """Look whether all ranks of the axis have these values, as long as not many were compared. Collective.

        Called when an input is saved, which happens in the order of the model on all ranks; what leaves then may depend on
        when a dropped graph is collected.

        Raises:
            UsageError: on all ranks, when values differ between them.
        """
        if self._left_to_compare > 0 and self.cuts(tensor):
            self._left_to_compare -= 1
            self._check_equal(tensor.detach())

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

    def _check_equal(self, tensor: Tensor) -> None:
        bits = tensor.view(_INTEGER_OF_SIZE[tensor.itemsize]).sum(dtype=torch.int64)
        extremes = torch.stack([bits, ~bits])  # the largest of ~bits is that of the smallest of bits
        with naming("comparison of activations (partition_activations)"):
            comm.all_reduce(extremes, comm.ReduceOp.MAX, group=self._axis.group)
        largest, smallest = int(extremes[0]), ~int(extremes[1])
        if largest != smallest:
            raise UsageError(
                f"partition_activations: an input of a checkpointed part, {tensor.numel()} elements of {tensor.dtype}, "
                f"differs between the tensor-parallel ranks {list(self._axis.ranks)}, so that none of them may stand for "
                "the others. Leave partition_activations out where ranks see different values (sequence parallelism, or "
                "dropout that differs), or give configure() an mpu whose tensor-parallel ranks hold the same ones."
            )
