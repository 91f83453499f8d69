"""Joining the states that several ranks stored, as nestings of plain containers.

Does not live here: along which dimension a parameter is cut (`original.reading.tensor_parallel` knows, where a model
says it).
Called by `deepspeed_checkpoint`, `zero_checkpoint` and users.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError

__all__ = ["merge_state"]


def merge_state(state_a: Any, state_b: Any, key_list: Collection[str] = ()) -> Any:
    """Join two states of one structure: tensors along dimension 0, dictionaries by key, lists entry by entry.

    What cannot be joined (numbers, text, tensors of one number) is `state_a`'s, and so is what both have under a key of
    `key_list`; keys that only one has are kept.

    Raises:
        ArgumentError: lists of different lengths.
    """
    if isinstance(state_a, Tensor) and isinstance(state_b, Tensor):
        return torch.cat([state_a, state_b]) if state_a.dim() and state_b.dim() else state_a
    if isinstance(state_a, dict) and isinstance(state_b, dict):
        common = {
            key: value if key in key_list or key not in state_b else merge_state(value, state_b[key], key_list)
            for key, value in state_a.items()
        }
        joined = type(state_a)(common)
        joined.update((key, value) for key, value in state_b.items() if key not in state_a)
        return joined
    if isinstance(state_a, list) and isinstance(state_b, list):
        if len(state_a) != len(state_b):
            raise ArgumentError(
                f"lists of {len(state_a)} and {len(state_b)} entries cannot be merged entry by entry. Both states must come "
                "from ranks of one checkpoint."
            )
        return [merge_state(a, b, key_list) for a, b in zip(state_a, state_b, strict=True)]
    return state_a
