"""What a nested container of tensors looks like without its values, so that another process can make room for it.

    (hidden, {"mask": bools, "length": 12}, None)  ->  Form: the containers, and for each leaf its shape and dtype, or itself

It travels as JSON: what another rank sends builds containers and plain values, and runs nothing.

Lives here: taking trees apart and putting them together. Does not live here: sending (`pipe.transport`, which calls this).
Containers are those of `torch.utils._pytree`, as everywhere in this library (`common.pytree`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from deepspeed.errors import PipelineError

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
    """A leaf that is no tensor: None, a number, a string, a dtype or a device. It travels in the description."""

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
        """JSON, for the ranks of the same job.

        Raises:
            PipelineError: it holds something that JSON and the containers of `torch.utils._pytree` do not describe.
        """
        named = sorted({_name_of(kind) for kind in _named_tuples(self.spec)})
        try:
            content = json.dumps([named, _pytree.treespec_dumps(self.spec), [_described(leaf) for leaf in self.leaves]])
            is_same = Form.from_bytes(content.encode()) == self
        except (TypeError, NotImplementedError) as error:
            raise PipelineError(f"{_CANNOT_TRAVEL} ({error})") from error
        if not is_same:
            raise PipelineError(
                f"{_CANNOT_TRAVEL} (keys that are no text or numbers, or subclasses of plain values: {self})"
            )
        return content.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Form:
        """Inverse of `to_bytes`."""
        named, spec, leaves = json.loads(content)
        for name in named:
            _register(name)
        return cls(_pytree.treespec_loads(spec), tuple(_leaf(kind, value) for kind, value in leaves))

    def __str__(self) -> str:
        return ", ".join(str(leaf) if isinstance(leaf, TensorForm) else repr(leaf.value) for leaf in self.leaves)


_CANNOT_TRAVEL = (
    "what a layer hands on to the next stage cannot be described to it. Hand on tensors, None, numbers, text, dtypes and "
    "devices, in tuples, named tuples of a module, lists and dicts"
)
_PLAIN = (type(None), bool, int, float, str)


def _described(leaf: TensorForm | Plain) -> tuple[str, Any]:
    if isinstance(leaf, TensorForm):
        return "tensor", (leaf.shape, str(leaf.dtype), leaf.requires_grad)
    if isinstance(leaf.value, torch.dtype | torch.device):
        return type(leaf.value).__name__, str(leaf.value)
    if type(leaf.value) not in _PLAIN:
        raise TypeError(f"a {type(leaf.value).__name__}")
    return "plain", leaf.value


def _leaf(kind: str, value: Any) -> TensorForm | Plain:
    if kind == "tensor":
        shape, dtype, requires_grad = value
        return TensorForm(tuple(shape), _dtype(dtype), requires_grad)
    if kind == "dtype":
        return Plain(_dtype(value))
    return Plain(torch.device(value) if kind == "device" else value)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    assert isinstance(dtype, torch.dtype)  # `_described` wrote it
    return dtype


def _named_tuples(spec: _pytree.TreeSpec) -> Iterator[type]:
    """Classes of named tuples in a tree, known to `_pytree` by name from now on."""
    if isinstance(spec.context, type) and issubclass(spec.context, tuple):
        _register(_name_of(spec.context), spec.context)
        yield spec.context
    for child in spec.children() if hasattr(spec, "children") else spec.children_specs:  # older torch
        yield from _named_tuples(child)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _register(name: str, kind: type | None = None) -> None:
    """Let `_pytree` know a class of named tuples by `name`, which is looked for in loaded modules; none is imported."""
    if name in _registered:
        return
    if kind is None:
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
            raise PipelineError(
                f"a stage hands on a named tuple of class {name}, which this rank does not have. Define it at the top of a "
                "module that every rank imports, or hand on a tuple."
            )
        kind = found
    _pytree._register_namedtuple(kind, serialized_type_name=name)
    _registered.add(name)


_registered: set[str] = set()
"""Names of the classes of named tuples that `_pytree` knows from here: of the process, as its registry is."""


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
