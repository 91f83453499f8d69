"""Copies inside host memory that leave the cache alone: state that is set aside, and not read soon.

    native    the C library's or torch's copy first reads each line it overwrites; stores that go around the cache do not:
              two bytes move for a byte copied, not three, and what the next computation needs stays in the cache
    twin      `Tensor.copy_`

Called by `checkpoint.save.snapshot` and the tiers of `offload`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.ops.native import library

__all__ = ["copy_host", "copy_host_twin"]


def copy_host(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy from the second to the first of each pair, on at most `torch.get_num_threads()` threads.

    Args:
        copies: pairs of equal shape and dtype in host memory that do not overlap; any layout, but fast where both are
            contiguous.
    """
    native = library()
    fit = [(to, of) for to, of in copies if native is not None and to.is_contiguous() and of.is_contiguous()]
    copy_host_twin([(to, of) for to, of in copies if native is None or not (to.is_contiguous() and of.is_contiguous())])
    if native is None or not fit:
        return
    count = len(fit)
    pointers, numbers = ctypes.c_void_p * count, ctypes.c_int64 * count
    function = native.function("ds_copy", ctypes.c_int32, pointers, pointers, numbers, ctypes.c_int64, ctypes.c_int32)
    status = function(
        pointers(*(to.data_ptr() for to, _ in fit)),
        pointers(*(of.data_ptr() for _, of in fit)),
        numbers(*(of.nbytes for _, of in fit)),
        count,
        torch.get_num_threads(),
    )
    if status != 0:  # no memory for its list: torch's call needs none
        copy_host_twin(fit)


def copy_host_twin(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The same on torch's call."""
    with torch.no_grad():
        for to, of in copies:
            to.copy_(of)
