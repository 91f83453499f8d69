"""Values that experts' graphs do not keep, because backward makes them again: the same bits at little cost.

    forward    linear saves gelu(x)        pack      made by gelu of x, and gelu's own node keeps x: keep (gelu, x)
               linear saves its rows       pack      taken from the tokens: keep (index_select, tokens, their numbers)
    backward   linear needs gelu(x)        unpack    gelu runs on x once more

Experts are the user's modules. A mode around them sees their calls and notes the results whose making is known
(`_NOTERS`); hooks on saved tensors look up what autograd saves. The graph itself stays as it is: nothing is replaced, so
hooks, gradients of gradients and modules that are not understood work as ever, and keep what they keep.

[Note: only what is kept anyhow] A result is noted where the operation that made it keeps the inputs for its own backward, so
a recipe holds no memory of its own. `relu` and `tanh` keep their outputs: there is nothing to gain.

[Note: hooks of others] Hooks in force outside (a checkpoint, ZeRO's at stage 3) get every tensor that has no recipe, and the
inputs of every recipe. Hooks that begin inside replace these, as torch nests them; then more is kept, and that is all.

Letters as in `moe.dispatch`. Called by `moe.layer` and `moe.auto_ep`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepspeed.common.saved_tensors import Hook, outer_hooks, unchanged, without_own_node
from deepspeed.common.shapes_alone import is_plain

__all__ = ["Remaking", "remaking"]


class Remaking(Protocol):
    """What the caller of `remaking` gets."""

    def taken(self, rows_RM: Tensor, hidden_TM: Tensor, token_R: Tensor) -> Tensor:
        """Return `rows_RM`, noted as `hidden_TM[token_R]`."""


@contextlib.contextmanager
def remaking() -> Iterator[Remaking]:
    """While in force, graphs built on this thread keep recipes in place of values that are made again cheaply."""
    is_off = (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    )
    if is_off:
        yield _KeepAll()
        return
    notes = _Notes()
    with torch.autograd.graph.saved_tensors_hooks(*_hooks(notes, outer_hooks())), _Noting(notes):
        yield notes


class _KeepAll:
    def taken(self, rows_RM: Tensor, hidden_TM: Tensor, token_R: Tensor) -> Tensor:
        del hidden_TM, token_R
        return rows_RM


@dataclass(frozen=True)
class _Recipe:
    """`make(*whole, *cut)`; rows a to b of the result come from rows a to b of each of `cut`."""

    make: Callable[..., Tensor]
    whole: tuple[_Input, ...]
    cut: tuple[_Input | _Recipe, ...]

    def part(self, start: int, rows: int) -> _Recipe:
        """The recipe of some neighbouring rows."""
        return _Recipe(self.make, self.whole, tuple(each.part(start, rows) for each in self.cut))

    def packed(self, pack: Hook) -> _Packed:
        """The recipe with its inputs as hooks keep them."""
        return _Packed(self.make, tuple(each.packed(pack) for each in (*self.whole, *self.cut)))


class _Input(NamedTuple):
    tensor: Tensor
    version: int

    def part(self, start: int, rows: int) -> _Input:
        return _Input(self.tensor.narrow(0, start, rows), self.version)

    def packed(self, pack: Hook) -> Any:
        return pack(unchanged(*self))


class _Packed(NamedTuple):
    make: Callable[..., Tensor]
    inputs: tuple[Any, ...]

    def value(self, unpack: Hook) -> Tensor:
        values = [each.value(unpack) if type(each) is _Packed else unpack(each) for each in self.inputs]
        with torch.no_grad(), torch.autocast(values[0].device.type, enabled=False):
            return self.make(*values)


def _hooks(notes: _Notes, outer: tuple[Hook, Hook] | None) -> tuple[Hook, Hook]:
    keep, take = outer if outer is not None else (_keep, _take)

    def pack(tensor: Tensor) -> Any:
        recipe = notes.recipe_of(tensor)
        return keep(tensor) if recipe is None else recipe.packed(keep)

    def unpack(kept: Any) -> Tensor:
        tensor: Tensor = kept.value(take) if type(kept) is _Packed else take(kept)
        return tensor

    return pack, unpack


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    tensor = without_own_node(tensor)
    return tensor, tensor._version


def _take(kept: tuple[Tensor, int]) -> Tensor:
    return unchanged(*kept)


class _Note(NamedTuple):
    result: weakref.ref[Tensor]
    version: int
    recipe: _Recipe


class _Notes:
    """Recipes of tensors that are alive."""

    def __init__(self) -> None:
        self._notes: dict[int, _Note] = {}

    def taken(self, rows_RM: Tensor, hidden_TM: Tensor, token_R: Tensor) -> Tensor:
        if not hidden_TM.is_inference():  # such a tensor has no version
            self.add(rows_RM, _Recipe(_rows_of, (_input(hidden_TM),), (_input(token_R),)))
        return rows_RM

    def add(self, result: Tensor, recipe: _Recipe) -> None:
        key, notes = id(result), self._notes
        gone = weakref.ref(result, lambda gone: notes.pop(key) if key in notes and notes[key].result is gone else None)
        notes[key] = _Note(gone, result._version, recipe)

    def recipe_of(self, tensor: Tensor) -> _Recipe | None:
        """How the tensor was made; None if that is not known, or it was changed since."""
        note = self._notes.get(id(tensor))
        if note is None or note.result() is not tensor or note.version != tensor._version:
            return None
        return note.recipe

    def source_of(self, tensor: Tensor) -> _Input | _Recipe:
        """The recipe, else the tensor itself."""
        return self.recipe_of(tensor) or _input(tensor)


def _input(tensor: Tensor) -> _Input:
    return _Input(tensor.detach(), tensor._version)


def _rows_of(hidden_TM: Tensor, token_R: Tensor) -> Tensor:
    return hidden_TM.index_select(0, token_R)


class _Noting(TorchFunctionMode):
    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        noter = _NOTERS.get(func)
        if noter is not None:
            noter(self._notes, func, args, given, result)
        return result


# -- what is known ------------------------------------------------------------------------------------------------------


def _note_activation(
    notes: _Notes, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any], result: Any
) -> None:
    """A function of one tensor, element by element."""
    if not args or result is args[0] or not _are_alike(result, args[0]):  # the same: in place
        return
    make = functools.partial(_with_rest, func, args[1:], dict(given))
    notes.add(result, _Recipe(make, (), (notes.source_of(args[0]),)))


def _with_rest(func: Callable[..., Tensor], rest: Sequence[Any], given: Mapping[str, Any], x: Tensor) -> Tensor:
    return func(x, *rest, **given)


def _note_product(
    notes: _Notes, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any], result: Any
) -> None:
    """Two tensors multiplied element by element, each needing a gradient: so both are kept."""
    if len(args) == 2 and not given and _are_alike(result, *args):
        notes.add(result, _Recipe(torch.mul, (), tuple(notes.source_of(each) for each in args)))


def _note_parts(notes: _Notes, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any], result: Any) -> None:
    """Neighbouring rows of what is known: `split_with_sizes`."""
    recipe = notes.recipe_of(args[0]) if len(args) == 2 and not given else None
    if recipe is None:
        return
    start = 0
    with torch.no_grad():
        for part in result:
            notes.add(part, recipe.part(start, len(part)))
            start += len(part)


def _are_alike(result: Any, *inputs: Any) -> bool:
    """Whether all are plain tensors of one shape and kind, in a graph: [Note: only what is kept anyhow]."""
    return (
        is_plain(result)
        and result.requires_grad
        and all(
            is_plain(each)
            and each.requires_grad
            and each.dtype == result.dtype  # else autocast had a hand in it
            and each.shape == result.shape
            and each.dim() > 0
            and each.layout == torch.strided
            for each in inputs
        )
    )


_Noter = Callable[[_Notes, Callable[..., Any], Sequence[Any], Mapping[str, Any], Any], None]

_NOTERS: dict[Callable[..., Any], _Noter] = {
    **dict.fromkeys((F.gelu, F.silu, F.mish, torch.square, Tensor.square), _note_activation),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _note_product),
    **dict.fromkeys((torch.split_with_sizes, Tensor.split_with_sizes), _note_parts),
}
