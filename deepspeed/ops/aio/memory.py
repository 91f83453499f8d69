"""Host memory that files can be read into without a copy.

Lives here: `aligned_empty`. Called by whoever makes buffers for an `IoEngine`: the tiers, writers, `aio_handle`.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import psutil
import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import ArgumentError, HostMemoryError

__all__ = ["aligned_empty"]

_HUGE_PAGE_NBYTES = 2 << 20


def aligned_empty(nbytes: int, *, is_pinned: bool = False) -> Tensor:
    """Return host memory that begins at a page, as a 1-D uint8 tensor.

    It is zero, takes memory with the first touch and goes back to the system with the last tensor that views it. Large
    ones ask for huge pages, of which a direct transfer has fewer to look up.

    Args:
        nbytes: its length, at least 0.
        is_pinned: lock it for the current accelerator, where that has something to lock it for (`register_host_memory`).

    Raises:
        HostMemoryError: there is not so much.
    """
    if nbytes < 0:
        raise ArgumentError(f"aligned_empty(nbytes={nbytes}), but a length is at least 0. Give the bytes that are needed.")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        free_nbytes = psutil.virtual_memory().available
        raise HostMemoryError(
            f"{nbytes} bytes of host memory were asked for, and the system refuses ({error.strerror}); {free_nbytes} are "
            "free. Ask for less, or raise the limit (`ulimit -v`)."
        ) from error
    if nbytes >= _HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if is_pinned:
        accelerator = get_accelerator()
        if accelerator.register_host_memory(tensor):
            # The storage outlives each view; what is unlocked must still be mapped then, so the mapping is held here too.
            weakref.finalize(tensor.untyped_storage(), _unlock, tensor.data_ptr(), nbytes, pages)
    return tensor


def _unlock(address: int, nbytes: int, pages: mmap.mmap) -> None:
    view = torch.frombuffer(pages, dtype=torch.uint8)
    assert view.data_ptr() == address  # a view of the same mapping
    assert view.nbytes == nbytes
    get_accelerator().unregister_host_memory(view)
