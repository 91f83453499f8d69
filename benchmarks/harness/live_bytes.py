"""Bytes that tensors hold, counted exactly: each operator's new memory until its last tensor goes.

    with LiveBytes() as live:
        loss = model(batch)      live.now_nbytes: what autograd keeps (and the results that somebody holds)
        loss.backward()          live.peak_nbytes: the most at once since `reset_peak`

Not counted: tensors from before, and memory that no operator of torch made (`aligned_empty`, shared memory). It slows
training down: figures of time are taken without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts while in force; memory that was counted is discounted when it is freed, also later."""

    def __init__(self) -> None:
        super().__init__()
        self.now_nbytes = 0
        self.peak_nbytes = 0
        self._known: set[int] = set()

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now."""
        self.peak_nbytes = self.now_nbytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):
            self._see(storage, nbytes=0)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._see(storage, storage.nbytes())
        return result

    def _see(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)
        weakref.finalize(storage, self._gone, key, nbytes).atexit = False

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now_nbytes -= nbytes


def _storages(tree: object) -> list[torch.UntypedStorage]:
    found = (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in found if tensor.layout == torch.strided]
