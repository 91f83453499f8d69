r"""A process group for one thread beside training: its collectives meet nobody else's and outlive the default group.

    training thread   all_reduce, all_gather, ... on the world and the mesh's groups        watched, in one order
    another thread    all_gather, broadcast on the group that was made for it alone         in an order of its own

A collective on one of training's groups from a second thread would be paired with whatever training calls at that moment on
another rank. So the thread has a gloo group of its own, and calls it directly:

- `destroy_process_group()`, often the last line of a script, ends only torch's book-keeping of it. The connections stay for
  as long as somebody holds the group, so work that is under way ends well.
- the watch (`comm.watch`) does not follow it. It judges over the threads that train; this one makes the same few calls on
  every rank whatever training does, and a peer that dies closes its connections, which is an error here at once.

Does not live here: threads, and what is said over the group (`checkpoint.save.background`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.failures import WHERE_TO_LOOK
from deepspeed.comm.places import new_group
from deepspeed.common.logging import get_logger
from deepspeed.errors import CommError

__all__ = ["AsideGroup", "new_aside_group"]

logger = get_logger(__name__)


class AsideGroup:
    """All ranks, for one thread of each. Tensors are on the CPU; every call blocks until all ranks have made it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Take over a gloo group of all ranks that nobody else uses."""
        self._group = group
        self.world_size = group.size()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Bring the tensors of all ranks, of equal size, to every rank, in rank order.

        Raises:
            CommError: a peer ended, or did not come in time.
        """
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._finish("all_gather", lambda: self._group.allgather([gathered], [tensor]))
        return gathered

    def broadcast(self, tensor: Tensor) -> None:
        """Bring the first rank's values into `tensor` on every rank.

        Raises:
            CommError: a peer ended, or did not come in time.
        """
        self._finish("broadcast", lambda: self._group.broadcast(tensor, 0))

    def close(self) -> None:
        """Let torch forget the group, which otherwise keeps it for as long as the default group. Not collective."""
        if dist.is_initialized():
            try:
                dist.destroy_process_group(self._group)
            except ValueError as error:  # it went with a default group that is there no more
                logger.debug("the group beside training was forgotten before: %s", error)

    def _finish(self, operation: str, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait()
        except RuntimeError as cause:
            raise CommError(
                f"{operation} failed on rank {self._group.rank()} of {self.world_size}, in a group beside training: "
                f"{cause} {WHERE_TO_LOOK}"
            ) from cause


def new_aside_group() -> AsideGroup:
    """Make a group of all ranks for a thread beside training. Collective over the world."""
    return AsideGroup(new_group(backend="gloo"))
