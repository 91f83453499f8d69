"""One checkpointed part of a model: run without keeping what it computes, run again when backward needs that.

    checkpoint(function, *args, **kwargs)
      args, kwargs --split--> tensors + rebuild
      forward     hooks: tensors ---> keeper, or as ever      torch.utils.checkpoint(rebuild -> function) ---> outputs
      backward    hooks: keeper ---> tensors                  rebuild -> function, streams as in forward ---> gradients

Recomputation itself, with the generators and autocast of forward, is `torch.utils.checkpoint`'s. The form is the
non-reentrant one: gradients reach everything that the function uses (keyword arguments, containers, closures, parameters
although no input takes a gradient), `torch.autograd.grad` and several backward passes work, recomputation stops when all
is there that backward needs, and a function that computes something else the second time is an error. The re-entrant form
is there for code that asks for it (`checkpointing.reentrant_checkpoint`): it runs a backward inside of backward, and one
input at least must take a gradient. Tensors are taken out of their containers first, so it too accepts keyword arguments and
containers.

Both forms save their inputs as autograd saves any tensor, so hooks on saved tensors decide where these rest. Only the
outermost segment's are moved: those of a segment inside of another one are computed again anyway.

Lives here: `Checkpointer`. Does not live here: settings (`checkpointing`, the caller), where inputs rest (`keeping`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.activations.boundary import Boundary
from deepspeed.activations.keeping import Keeper, Kept, Row
from deepspeed.activations.random_states import CudaRNGStatesTracker
from deepspeed.common.pytree import split_tensors
from deepspeed.common.saved_tensors import outer_hooks, unchanged
from deepspeed.ops.host_products import repeated

__all__ = ["Checkpointer"]

Output = TypeVar("Output")


class Checkpointer:
    """Runs segments with one set of settings.

    Args:
        keeper: of their inputs; None leaves all where they are.
        boundary: makes the ends of a segment.
        streams: random streams that recomputation repeats.
    """

    def __init__(self, keeper: Keeper | None, boundary: Callable[[], Boundary], streams: CudaRNGStatesTracker) -> None:
        self._keeper = keeper
        self._boundary = boundary
        self._streams = streams
        self._inside = threading.local()

    def run(
        self, function: Callable[..., Output], args: Sequence[Any], kwargs: dict[str, Any], *, use_reentrant: bool = False
    ) -> Output:
        """`function(*args, **kwargs)`; under `torch.no_grad` just that."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        tensors, rebuild = split_tensors((tuple(args), kwargs))
        boundary = self._boundary()
        tensors = boundary.enter(tensors)
        with self._keeping() as seal:
            segment = _Segment(function, rebuild, boundary, self._streams, seal, self._nested)
            output: Output = segment.run(tensors, use_reentrant=use_reentrant)
        return boundary.leave(output)

    @contextlib.contextmanager
    def _nested(self) -> Iterator[None]:
        """Segments that begin inside the block are parts of another one."""
        before, self._inside.segment = getattr(self._inside, "segment", False), True
        try:
            yield
        finally:
            self._inside.segment = before

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[Callable[[], None]]:
        """Let the keeper have what a segment saves of its inputs; gives what is to be called when it has."""
        keeper = self._keeper
        if keeper is None or getattr(self._inside, "segment", False):
            yield lambda: None
            return
        row = keeper.begin()
        with torch.autograd.graph.saved_tensors_hooks(*_hooks(keeper, row)):
            yield lambda: keeper.seal(row)


class _Segment:
    """The function that torch's checkpoint is given: takes tensors, and knows its first run from the others."""

    def __init__(
        self,
        function: Callable[..., Any],
        rebuild: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]],
        boundary: Boundary,
        streams: CudaRNGStatesTracker,
        seal: Callable[[], None],
        nested: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._function = function
        self._rebuild = rebuild
        self._boundary = boundary
        self._streams = streams
        self._seal = seal
        self._nested = nested
        self._is_reentrant = False
        self._states: dict[str, Tensor] | None = None  # of the streams when it first began
        self._products = repeated()

    def run(self, tensors: Sequence[Tensor], *, use_reentrant: bool) -> Any:
        self._is_reentrant = use_reentrant
        if not use_reentrant:
            return torch_checkpoint(self, *tensors, use_reentrant=False)
        rebuild_output: list[Callable[[Sequence[Tensor]], Any]] = []

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            found, rebuild = split_tensors(self(*tensors))
            if not rebuild_output:
                rebuild_output.append(rebuild)
            return tuple(found)

        outputs = torch_checkpoint(flat, *tensors, use_reentrant=True)
        self._seal()  # this form saves its inputs last
        return rebuild_output[0](outputs)

    def __call__(self, *tensors: Tensor) -> Any:
        args, kwargs = self._rebuild(tensors)
        if self._states is None:
            return self._first(args, kwargs)
        with self._nested(), self._streams.restored(self._states), self._boundary.recomputation(), self._products():
            return self._function(*args, **kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._states = self._streams.get_states()
        if not self._is_reentrant:
            self._seal()
        with self._nested(), self._boundary.forward(), self._products():
            return self._function(*args, **kwargs)


def _hooks(keeper: Keeper, row: Row) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    outer_pack, outer_unpack = outer_hooks() or (None, None)

    def pack(tensor: Tensor) -> Any:
        kept = keeper.keep(tensor, row)
        if kept is not None:
            return kept
        return (tensor, tensor._version) if outer_pack is None else (outer_pack(tensor), None)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Kept):
            return keeper.take(packed)
        what, version = packed
        tensor: Tensor = unchanged(what, version) if outer_unpack is None else outer_unpack(what)
        return tensor

    return pack, unpack
