"""Nested containers on their way to `torch.save`, and names of the original's files, under a name that clients import.

Does not live here: our own format (`save.writer`). The names of files are made in
`original.published.stage_file_names`. Called by clients; modules of which ranks have parts leave word (`note_part`).
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
from deepspeed.errors import ArgumentError

__all__ = [
    "clone_tensors_for_torch_save",
    "forget_parts",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "note_part",
]

_PARTS = "deepspeed_parts"  # attribute of a state dict: name of each module of parts -> which it has


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy a nesting of dicts, lists and tuples so that each tensor owns exactly its own elements.

    `torch.save` writes the whole storage behind a tensor, so a view of a large flat buffer drags all of it into the file.
    Tensors that were the same view (tied weights) are one tensor in the copy, so they are still written once. Other values
    are passed on.

    Args:
        item: the nesting; not changed.
        device: where the copies live.

    Raises:
        ArgumentError: it is a module's state dict in which this rank has parts of tensors, so that the copy would pass
            for whole weights.
    """
    return _clone(item, torch.device(device), {})


def note_part(state_dict: Any, prefix: str, held: str) -> None:
    """Leave word in a state dict that is being made that this rank has parts of the tensors of a module.

    Args:
        state_dict: what `Module.state_dict` hands to `_save_to_state_dict`; others are left alone.
        prefix: of the module's names, as handed to the same.
        held: which parts, for people.
    """
    if hasattr(state_dict, "_metadata"):  # torch's own class, which takes attributes
        setattr(state_dict, _PARTS, {**getattr(state_dict, _PARTS, {}), prefix[:-1]: held})


def forget_parts(state_dict: Any) -> None:
    """Take the word back, in a copy whose parts were replaced by whole tensors."""
    if hasattr(state_dict, _PARTS):
        delattr(state_dict, _PARTS)


def _refuse_parts(item: Any) -> None:
    parts = [f"{name or 'the model'} has {held}" for name, held in getattr(item, _PARTS, {}).items()]
    if parts:
        raise ArgumentError(
            f"a state dict with parts of tensors, of which other ranks have the rest: {parts[0]} (and {len(parts) - 1} more "
            "modules). Saved, it would pass for the whole model. Take whole weights, on all ranks: "
            "engine.save_16bit_model(folder) writes them, engine._consolidated_16bit_state_dict() returns them on rank 0."
        )


def _clone(item: Any, device: torch.device, done: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(item, Tensor):
        same = (item.device, item.data_ptr(), item.dtype, tuple(item.shape), item.stride()) if item.numel() else (id(item),)
        if same not in done:
            done[same] = item.detach().to(device, copy=True)
        return done[same]
    if isinstance(item, dict):
        _refuse_parts(item)
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
