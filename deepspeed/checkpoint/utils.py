"""Nested containers on their way to `torch.save`. The name `deepspeed.checkpoint.utils` is one that clients import.

Does not live here: our own format (`writer`). Called by `engine.whole_model` for `save_16bit_model`, and by clients.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy a nesting of dicts, lists and tuples so that each tensor owns exactly its own elements.

    `torch.save` writes the whole storage behind a tensor, so a view of a large flat buffer drags all of it into the file.
    Tensors that were the same view (tied weights) are one tensor in the copy, so they are still written once. Other values
    are passed on.

    Args:
        item: the nesting; not changed.
        device: where the copies live.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, done: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(item, Tensor):
        same = (item.device, item.data_ptr(), item.dtype, tuple(item.shape), item.stride()) if item.numel() else (id(item),)
        if same not in done:
            done[same] = item.detach().to(device, copy=True)
        return done[same]
    if isinstance(item, dict):
        copied = copy.copy(item)  # keeps the class and, of a state dict, the attribute `_metadata`
        copied.update({key: _clone(value, device, done) for key, value in item.items()})
        return copied
    if isinstance(item, torch.Size):
        return item
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_clone(value, device, done) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_clone(value, device, done) for value in item)
    return item
