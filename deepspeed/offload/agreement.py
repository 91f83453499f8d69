"""What one rank met with its disk, all ranks raise: nobody is left waiting in a collective.

    with together(axis, device):      FileIoError of one rank ---> all ranks raise one that names rank, file and cause
        read, write

One all-reduce of one number per use; the texts travel only when there is an error. Called by whatever touches a tier's files
while other ranks do the same (`zero.disk_residence`, `engine.build`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed import comm
from deepspeed.errors import FileIoError
from deepspeed.topology.mesh import AxisGroup

__all__ = ["together"]


@contextmanager
def together(axis: AxisGroup, device: torch.device) -> Iterator[None]:
    """Run the body on all ranks of `axis`; an error with a file on any of them is raised on all. Collective.

    Args:
        axis: the ranks.
        device: where collectives of this run have their tensors.

    Raises:
        FileIoError: a rank could not read or write; the text of the first such rank. Its own error is the cause there.
    """
    own: FileIoError | None = None
    try:
        yield
    except FileIoError as error:
        own = error
    if axis.size == 1:
        if own is not None:
            raise own
        return
    has_failed = torch.tensor([float(own is not None)], device=device)
    comm.all_reduce(has_failed, group=axis.group)
    if not has_failed.item():
        return
    found: list[Any] = [None] * axis.size
    comm.all_gather_object(found, None if own is None else (own.errno or errno.EIO, str(own)), group=axis.group)
    rank, (number, text) = next((rank, each) for rank, each in enumerate(found) if each is not None)
    known = text if text.startswith("rank ") else f"rank {axis.ranks[rank]} {text}"  # one `together` may be inside another
    raise FileIoError(number, known) from own
