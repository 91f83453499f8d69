"""Tensors inside nested containers: inputs of a forward, batches of a loader, outputs of a model.

Lives here: walking and rebuilding. Dicts, lists, tuples, named tuples, deques and every class registered with
`torch.utils._pytree` (Transformers registers its output classes) keep their type; anything else is a leaf that is passed
through untouched.

Called by `engine.engine` for `fp16.auto_cast`, by `activations.segment`, and by clients as
`deepspeed.runtime.utils.move_to_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.utils import _pytree

__all__ = ["map_tensors", "move_to_device", "split_tensors", "tensors"]

Tree = TypeVar("Tree")


def map_tensors(transform: Callable[[torch.Tensor], object], tree: Tree) -> Tree:
    """Return a copy of `tree` with every tensor `t` replaced by `transform(t)`; other leaves are the same objects.

    A tree without tensors comes back as it is (`is`), so that objects the walk does not know are never rebuilt.
    """
    leaves, spec = _pytree.tree_flatten(tree)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return tree
    mapped = [transform(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    rebuilt: Tree = _pytree.tree_unflatten(mapped, spec)
    return rebuilt


def split_tensors(tree: Tree) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Tree]]:
    """Take the tensors out of `tree`.

    Returns:
        The tensors, depth first, and a function that puts others in their places: `rebuild(found)` equals `tree`. It holds
        the other leaves, and no tensor.
    """
    leaves, spec = _pytree.tree_flatten(tree)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    others = [None if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)]

    def rebuild(replacements: Sequence[torch.Tensor]) -> Tree:
        following = iter(replacements)
        filled = [next(following) if is_one else other for other, is_one in zip(others, is_tensor, strict=True)]
        rebuilt: Tree = _pytree.tree_unflatten(filled, spec)
        return rebuilt

    return found, rebuild


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of `tree`, depth first, in the order of its containers."""
    leaves = _pytree.tree_leaves(tree)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def move_to_device(item: Tree, device: torch.device | str | int) -> Tree:
    """Return `item` with every tensor on `device`; a tensor that is there already is not copied.

    Copies from pinned host memory do not wait for the device.
    """
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), item)
