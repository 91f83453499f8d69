"""Nested containers on their way to `torch.save`, and names of the original's files, under a name that clients import.

Does not live here: our own format (`save.writer`). The names of files are made in
`original.published.stage_file_names`. Called by `engine.whole_model` for `save_16bit_model`, and by clients.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.original.published.stage_file_names import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]


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
