"""The checks of `CheckpointSource.read`, the same for every layout.

Lives here: whether a range and a destination fit a tensor. Does not live here: reading. Called by the sources.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError

__all__ = ["prepare_out", "unknown_tensor"]


def prepare_out(name: str, numel: int, dtype: torch.dtype, start: int, length: int | None, out: Tensor | None) -> Tensor:
    """The flat tensor to fill with elements from `start` on of a tensor of `numel` elements: `out`, or a new one.

    Raises:
        ArgumentError: the range or `out` does not fit the tensor.
    """
    if length is None:
        length = numel - start if out is None else out.numel()
    if not 0 <= start <= start + length <= numel:
        raise ArgumentError(f"elements {start} to {start + length} of {name!r} were asked for; it has {numel} elements.")
    if out is None:
        return torch.empty(length, dtype=dtype)
    if out.dim() != 1 or out.numel() != length:
        raise ArgumentError(f"out for {length} elements of {name!r} has shape {tuple(out.shape)}; it must be ({length},).")
    return out


def unknown_tensor(folder: Path, name: str, known: Iterable[str]) -> ArgumentError:
    """The error for a name that the checkpoint does not have."""
    near = difflib.get_close_matches(name, known, n=3)
    return ArgumentError(
        f"checkpoint {folder} holds no tensor {name!r}. Nearest names: {', '.join(map(repr, near)) or 'none'}."
    )
