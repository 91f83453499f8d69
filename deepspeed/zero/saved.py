"""Autograd keeps the place of a gathered tensor, not its memory.

    forward    saves weight.t()     pack     its storage is a buffer of unit 3: keep (unit 3, piece, offset, shape, strides)
               saves activation     pack     keep the tensor itself
    backward   needs weight.t()     unpack   unit 3 is gathered if it is not, and the view is made again

So no graph keeps a buffer alive, and whatever order backward takes, weights are there when they are read.

[Note: parameters that a Function saved] Without hooks, `ctx.saved_tensors` holds the very parameter; under hooks autograd
makes a new tensor of whatever `unpack` returns, without its attributes. Clients ask what they saved whether it is whole, to
gather it if not (TRL's fused heads: `weight.ds_status`). So a parameter that a Python Function saved comes back as a
`SavedParameter`, whose class answers. Nobody else asks, so nobody else pays for its dispatch.

Lives here: the two hooks of `torch.autograd.graph.saved_tensors_hooks`. Does not live here: when they are in force
(`zero.coordinator.ParameterCoordinator.forward_scope`, the caller).

[Note: what saved-tensor hooks switch off] Under such hooks autograd does not check whether a saved tensor was changed in
place, so `unpack` does. And what an operation saves of its own output must not be kept as it is: the tensor holds its graph
node, which holds the tensor. Only such a tensor is detached; it is known by its node being the latest one made.

[Note: hooks of others] Hooks that are in force when a forward begins (a checkpoint around the whole model, `save_on_cpu`)
get every tensor that is not a gathered one. Hooks that begin inside the forward replace ours, as torch nests them; then
memory may live longer, and nothing else changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed.common.saved_tensors import Hook, changed_in_place, outer_hooks, unchanged
from deepspeed.zero.pool import Storages
from deepspeed.zero.published import ZeroParamStatus
from deepspeed.zero.states import Unit

__all__ = ["SavedParameter", "SavedTensors"]

# `untyped_storage()._cdata` in half the time
_storage_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_apply_code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_detach = torch.ops.aten.detach.default


class SavedParameter(Tensor):
    """A whole parameter as `ctx.saved_tensors` gives it; computes as any tensor. [Note: parameters that a Function saved].

    `__torch_dispatch__` is what lets the class survive autograd, which detaches what was unpacked.
    """

    ds_status = ZeroParamStatus.AVAILABLE
    """As a sharded parameter has it (`zero.published`)."""

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` as on plain tensors."""
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        return _as_saved_parameter(result) if func is _detach else result


def _as_saved_parameter(whole: Tensor) -> SavedParameter:
    parameter: SavedParameter = torch.Tensor._make_subclass(SavedParameter, whole)
    return parameter


class _Place(NamedTuple):
    """A view of a gathered buffer, without the buffer."""

    demand: Callable[[Unit], None]
    unit: Unit
    position: int
    epoch: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_parameter: bool
    """Whether it is a whole parameter that a Function saved."""

    def view(self) -> Tensor:
        """The same view of the unit's buffer, gathered again if it was released."""
        if self.unit.epoch != self.epoch:
            raise changed_in_place(f"a parameter of {self.unit.name or 'the model'!r} was updated")
        self.demand(self.unit)
        buffer = self.unit.buffers[self.position]
        buffer = buffer if buffer.dtype == self.dtype else buffer.view(self.dtype)
        whole = buffer.as_strided(self.shape, self.strides, self.offset)
        return _as_saved_parameter(whole) if self.is_parameter else whole


class SavedTensors:
    """Makes the hooks.

    Args:
        storages: where gathered buffers are.
        demand: makes a unit whole for backward.
    """

    def __init__(self, storages: Storages, demand: Callable[[Unit], None]) -> None:
        self._storages = storages
        self._demand = demand
        self._plain = self._make(None)

    def push(self) -> None:
        """Put the hooks in force on this thread, on top of those that are; `pop` undoes it."""
        outer = outer_hooks()
        pack, unpack = self._plain if outer is None else self._make(outer)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    def pop(self) -> None:
        """Undo the latest `push` of this thread."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def _make(self, outer: tuple[Hook, Hook] | None) -> tuple[Hook, Hook]:
        storages, place_of = self._storages, self._place_of
        outer_pack, outer_unpack = outer if outer is not None else (None, None)

        def pack(tensor: Tensor) -> Any:  # called for every tensor that a forward saves: no call more than it takes
            try:
                key = _storage_of(tensor)
            except NotImplementedError:  # a sparse tensor has no storage, so it is nobody's view
                key = None
            if key in storages:
                place = place_of(tensor, key)
                if isinstance(place, _Place):
                    return place
                tensor = place
            if outer_pack is not None:
                return outer_pack(tensor)
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() + 1 >= _next_sequence_number():
                tensor = tensor.detach()  # [Note: what saved-tensor hooks switch off]
            return tensor, tensor._version

        def unpack(kept: Any) -> Tensor:
            if type(kept) is _Place:
                return kept.view()
            tensor: Tensor = unchanged(*kept) if outer_unpack is None else outer_unpack(kept)
            return tensor

        return pack, unpack

    def _place_of(self, tensor: Tensor, key: int) -> _Place | Tensor:
        found = self._storages[key]
        # two frames up is who saves: `Function.apply`, or whatever calls a function of torch
        is_parameter = isinstance(tensor, nn.Parameter) and sys._getframe(2).f_code is _apply_code
        if found is None:  # memory of a GatheredParameters block: the parameter will point elsewhere, this does not
            return _as_saved_parameter(tensor.detach()) if is_parameter else tensor.detach()
        if tensor.dtype.is_complex:  # may be a conjugate view, which strides do not tell
            return tensor.detach()
        unit, position = found
        offset = int(tensor.storage_offset())
        shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
        return _Place(self._demand, unit, position, unit.epoch, shape, strides, offset, dtype, is_parameter)
