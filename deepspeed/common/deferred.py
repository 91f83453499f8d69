"""A tensor that is read when it is needed: state on a disk that is never in memory all at once.

Lives here: the description and the call that reads. Made by `zero` for state on a tier; taken by the checkpoint room, which
writes one tensor after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DeferredTensor", "loaded"]


@dataclass(frozen=True)
class DeferredTensor:
    """A 1-D tensor of the host of which only the outside is known; the names are those of `torch.Tensor`."""

    length: int
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Gives it: `length` elements of `dtype`, on the host. May raise FileIoError."""

    layout = torch.strided
    device = torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return torch.Size((self.length,))

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return self.length * self.dtype.itemsize

    def numel(self) -> int:
        """Elements."""
        return self.length

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize

    def detach(self) -> DeferredTensor:
        """Itself: it has no graph."""
        return self


def loaded(tensor: Tensor | DeferredTensor) -> Tensor:
    """The tensor, read now if it was not."""
    return tensor.read() if isinstance(tensor, DeferredTensor) else tensor
