"""Do tensor-parallel ranks see the same data? Asked once, at the first forward of training.

    inputs of this rank --> 8 bytes --> all-gather over the tensor-parallel ranks: all equal?

Such ranks compute parts of one forward, so different inputs give numbers that belong to no batch, and no error.

Does not live here: what ranks were asked to build (`alike`). Called by the engine.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed import comm
from deepspeed.common.pytree import tensors
from deepspeed.errors import CommError
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.sanity import hash_bits

__all__ = ["SameInputs"]

_STEP = 0x9E3779B97F4A7C15  # odd: another one for each place in the arguments
_MASK = (1 << 63) - 1


class SameInputs:
    """Asks at the first call, and never again.

    Args:
        axis: the tensor-parallel ranks.
        device: where collectives want tensors.
    """

    def __init__(self, axis: AxisGroup, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._is_due = axis.size > 1

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the tensors in the arguments of forward. Collective over the axis at the first call.

        Raises:
            CommError: on all ranks of the axis, they differ.
        """
        if not self._is_due:
            return
        self._is_due = False
        digest = torch.tensor([_digest(args, kwargs)], dtype=torch.int64, device=self._device)
        digests = torch.empty(self._axis.size, dtype=torch.int64, device=self._device)
        comm.all_gather_into_tensor(digests, digest, group=self._axis.group)
        if (digests != digests[0]).any():
            raise CommError(
                f"rank {self._axis.ranks[self._axis.rank]}: tensor-parallel ranks {list(self._axis.ranks)} were given "
                "different inputs, but they compute parts of one forward and need the same batch. Use the loader of "
                "initialize(training_data=...), or give your sampler num_replicas=engine.dp_world_size and "
                "rank=engine.get_data_parallel_rank(), and the same seed on all ranks."
            )


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    digest = 1
    for tensor in tensors((args, sorted(kwargs.items()))):
        bits = int(hash_bits(tensor)) if tensor.layout is torch.strided and tensor.numel() else 0
        digest = (digest * _STEP + hash(tuple(tensor.shape)) + bits) & _MASK
    return digest
