"""What a nested container of tensors looks like without its values, so that another process can make room for it.

    (hidden, {"mask": bools, "length": 12}, None)  ->  Form: the containers, and for each leaf its shape and dtype, or itself

Lives here: taking trees apart and putting them together. Does not live here: sending (`pipe.transport`, which calls this).
Containers are those of `torch.utils._pytree`, as everywhere in this library (`common.pytree`).
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["Form", "Plain", "TensorForm", "digest", "room", "take_apart"]


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Plain:
    """A leaf that is no tensor: None, a number, a string, anything that pickles. It travels in the description."""

    value: Any


@dataclass(frozen=True)
class Form:
    """A tree without the values of its tensors."""

    spec: _pytree.TreeSpec
    leaves: tuple[TensorForm | Plain, ...]

    @property
    def tensors(self) -> list[TensorForm]:
        """The forms of its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def put_together(self, tensors: Iterable[Tensor]) -> Any:
        """The tree with these tensors in it."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorForm) else leaf.value for leaf in self.leaves]
        return _pytree.tree_unflatten(leaves, self.spec)

    def to_bytes(self) -> bytes:
        """For the ranks of the same job only: a pickle of the tree with forms in place of tensors."""
        leaves = [leaf if isinstance(leaf, TensorForm) else leaf.value for leaf in self.leaves]
        return pickle.dumps(_pytree.tree_unflatten(leaves, self.spec))

    @classmethod
    def from_bytes(cls, content: bytes) -> Form:
        """Inverse of `to_bytes`."""
        leaves, spec = _pytree.tree_flatten(pickle.loads(content))
        return cls(spec, tuple(leaf if isinstance(leaf, TensorForm) else Plain(leaf) for leaf in leaves))

    def __str__(self) -> str:
        return ", ".join(str(leaf) if isinstance(leaf, TensorForm) else repr(leaf.value) for leaf in self.leaves)


def take_apart(tree: Any) -> tuple[Form, list[Tensor]]:
    """The form of `tree`, and its tensors."""
    leaves, spec = _pytree.tree_flatten(tree)
    forms = tuple(TensorForm.of(leaf) if isinstance(leaf, Tensor) else Plain(leaf) for leaf in leaves)
    return Form(spec, forms), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def digest(form: Form, *more: object) -> int:
    """63 bits that are equal for equal forms (and `more`) in all processes."""
    content = repr((form.spec, form.leaves, more))  # a pickle depends on which equal objects are the same object, too
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big") >> 1


def room(forms: Sequence[TensorForm], device: torch.device) -> list[Tensor]:
    """Empty tensors of these forms."""
    return [torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms]
