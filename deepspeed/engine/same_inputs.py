"""Do tensor-parallel ranks see the same data? Asked before the first forward of training, and before every update.

    first forward      inputs --> 8 bytes ------------------> all-gather over the tensor-parallel ranks: all equal?
    later forwards     inputs --> 8 bytes --folded-->  |
    boundary backward                                  '----> all-gather, under way during backward
    step                                                      all equal? if not, nothing is updated

Such ranks compute parts of one forward, so different inputs give numbers that belong to no batch, and no error. So every
forward counts, at the cost of 8 bytes for each update. The host does not wait for an accelerator: there the answer to one
update is looked at in the next forward.

Does not live here: what ranks were asked to build (`alike`). Called by the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator.late import LateNumber
from deepspeed.common.pytree import tensors
from deepspeed.errors import CommError
from deepspeed.topology.mesh import AxisGroup
from deepspeed.zero.sanity import hash_bits

__all__ = ["SameInputs"]

_STEP = 0x1E3779B97F4A7C15  # odd: another one for each place in the arguments
_MASK = (1 << 62) - 1


class SameInputs:
    """What the forwards of this rank were given, compared with that of the others.

    Args:
        axis: the tensor-parallel ranks.
        device: where collectives want tensors.
    """

    def __init__(self, axis: AxisGroup, device: torch.device) -> None:
        self._axis = axis
        self._device = device
        self._is_first = True
        self._seen: Tensor | None = None
        self._asked: tuple[Tensor, Any] | None = None
        self._coming: LateNumber | None = None

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take notice of the tensors in the arguments of forward. Collective over the axis at the first call.

        Raises:
            CommError: on all ranks of the axis, they differ, or those of an earlier update did.
        """
        if self._axis.size == 1:
            return
        self._answer()
        before = torch.zeros((), dtype=torch.int64, device=self._device) if self._seen is None else self._seen
        self._seen = before * _STEP + _digest(args, kwargs, self._device)
        if self._is_first:
            self._is_first = False
            self.ask()
            self._answer()

    def ask(self) -> None:
        """Begin to compare what forwards were given since the last time, if there were any. Collective over the axis."""
        if self._seen is None:
            return
        self._answer()
        digests = torch.empty(self._axis.size, dtype=torch.int64, device=self._device)
        work = comm.all_gather_into_tensor(digests, self._seen.reshape(1), group=self._axis.group, async_op=True)
        self._seen, self._asked = None, (digests, work)
        if self._device.type != "cpu":  # the copy to the host is queued here, before the kernels of the step
            self._asked = None
            work.wait()
            self._coming = LateNumber((digests != digests[0]).any())

    def before_update(self) -> None:
        """See that all is well with what led to an update; an accelerator is asked in the next forward. Collective.

        Raises:
            CommError: see `check`.
        """
        self.ask()  # where the caller ran backward without the engine
        if self._device.type == "cpu":
            self._answer()

    def _answer(self) -> None:
        if self._asked is not None:
            digests, work = self._asked
            work.wait()
            self._coming = LateNumber((digests != digests[0]).any())
        coming, self._asked, self._coming = self._coming, None, None
        if coming is not None and coming.get():
            raise CommError(
                f"rank {self._axis.ranks[self._axis.rank]}: tensor-parallel ranks {list(self._axis.ranks)} were given "
                "different inputs, but they compute parts of one forward and need the same batch. Use the loader of "
                "initialize(training_data=...), or give your sampler num_replicas=engine.dp_world_size and "
                "rank=engine.get_data_parallel_rank(), and the same seed on all ranks."
            )


def _digest(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Tensor:
    """64 bits of values and shapes, on `device`; the host does not wait for it."""
    digest = torch.ones((), dtype=torch.int64, device=device)
    for tensor in tensors((args, sorted(kwargs.items()))):
        digest = digest * _STEP + (hash(tuple(tensor.shape)) & _MASK)
        if tensor.layout is torch.strided and tensor.numel():
            digest = digest + hash_bits(tensor).to(device)
    return digest
