"""A process group that only pretends: one process is told that there are others, and collectives give back what they got.

For whoever looks at shapes alone: code that asks for ranks and calls collectives runs as it is over tensors without values.
It is torch's own "fake" back end. Called by `planning`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from deepspeed.comm.world import destroy_process_group
from deepspeed.errors import UsageError

__all__ = ["pretended_world"]


@contextmanager
def pretended_world(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Be one of `size` ranks inside, and no rank of anything before and after.

    Args:
        size: ranks.
        rank: which one.

    Raises:
        UsageError: this process is a rank already.
    """
    if dist.is_initialized():
        raise UsageError(
            f"{size} ranks were to be pretended in a process that is rank {dist.get_rank()} of a job. Ask in a process of "
            "its own, or before the process group is made."
        )
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()  # registers the back end
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None  # initialized above
        yield group
    finally:
        destroy_process_group()
