"""Parameters and gradients of one optimizer group as views of flat buffers.

    param.data ----view----> parameters  [p3|p2 |.|p1  |p0|..]   16-bit or full precision: what the model computes with
    param.grad ----view----> gradients   [g3|g2 |.|g1  |g0|..]   what backward adds into, what the reducer reduces
                             master      [m3|m2 |.|m1  |m0|..]   full precision: what the optimizer updates; the same
                                                                 tensor as `parameters` when the model is not 16-bit

One layout (`sharding.FlatLayout`) serves the three buffers, so an element has the same offset in each. Autograd adds
gradients into the views in place; nothing is copied or concatenated.

What does not live here: communication (`zero.reducer`), the update (`zero.master`). Callers: `engine.build`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.sharding import FlatLayout, Slot

if TYPE_CHECKING:
    from deepspeed.comm.algorithms import FlatAllReducer

_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register
_OWNER = "_ds_owner"  # the one back-reference on a user's parameter: its Place


class Place:
    """Where a parameter lives, without keeping anything alive; a copy or a pickle of the parameter lives nowhere."""

    def __init__(self, group: FlatGroup, position: int, param: nn.Parameter) -> None:
        self.position = position
        self._group = weakref.ref(group)
        self._param = weakref.ref(param)

    def group_of(self, param: nn.Parameter) -> FlatGroup | None:
        """The flat group, None when it is gone or `param` is a copy."""
        return self._group() if self._param() is param else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, so that a saved model loads where this package is not installed."""
        return type(None), ()


@dataclass(frozen=True)
class NamedParameter:
    """A parameter under the name its module gives it; tied parameters appear once, under their first name."""

    name: str
    param: nn.Parameter
    order: int = 0
    """Position in the model's own order of registration, the best guess at the order of use before the first step."""


class FlatGroup:
    """The parameters of one optimizer group and dtype, moved into flat buffers.

    Shapes: `F` = layout.numel, padding included; every buffer is 1-D of F elements.
    Constructing it re-points `param.data` of every member at the buffer and frees the old storage, one by one.
    `is_row_sparse` groups hold embedding tables of which one micro-batch touches few rows: their gradients are reduced
    row by row (`zero.row_sparse`), never as whole buckets.
    `is_low_precision` groups travel in the autocast dtype (`lower_precision_safe_modules`).
    `on_replaced` runs when another engine takes one of the parameters over; `optimizer` gives the
    `zero.optimizer.ZeroOptimizer` that steps the group, while there is one.
    """

    def __init__(
        self,
        members: Sequence[NamedParameter],
        *,
        group_index: int,
        param_dtype: torch.dtype,
        master_dtype: torch.dtype,
        bucket_numel: int,
        world_size: int = 1,
        is_row_sparse: bool = False,
        is_low_precision: bool = False,
    ) -> None:
        self.members = tuple(members)
        self.group_index = group_index
        self.is_row_sparse = is_row_sparse
        self.is_low_precision = is_low_precision
        self.on_replaced: Callable[[], None] = self.release
        self.optimizer: Callable[[], object | None] = lambda: None
        alignment = _ALIGNMENT_BYTES // min(param_dtype.itemsize, master_dtype.itemsize)
        self.layout = FlatLayout.plan(
            [m.param.numel() for m in members], bucket_numel=bucket_numel, alignment=alignment, world_size=world_size
        )
        device = members[0].param.device
        self.parameters_F = torch.zeros(self.layout.numel, dtype=param_dtype, device=device)
        is_same = param_dtype == master_dtype
        self.master_F = self.parameters_F if is_same else torch.zeros(self.layout.numel, dtype=master_dtype, device=device)
        self._adopt_values()
        self._params = [self.members[slot.index].param for slot in self.layout.slots]  # in slot order: three loops per step
        self._addresses = [param.data_ptr() for param in self._params]
        self._versions = [param._version for param in self._params]
        self._reducer: FlatAllReducer | None = None
        self._views: list[Tensor] = []

    def _adopt_values(self) -> None:
        with torch.no_grad():
            for position, slot in enumerate(self.layout.slots):
                param = self.members[slot.index].param
                release_owner(param)
                self.master_F[slot.start : slot.stop].copy_(param.detach().reshape(-1))
                place = self.parameters_F[slot.start : slot.stop]
                if self.parameters_F is not self.master_F:
                    place.copy_(self.master_F[slot.start : slot.stop])
                param.grad = None
                param.data = place.view(param.shape)
                setattr(param, _OWNER, Place(self, position, param))

    def adopt_edits(self) -> None:
        """Take over what the caller did to parameters since the last update, so that the coming one builds on it.

        Values written into a 16-bit parameter (`load_state_dict`, `torch.nn.init`, `copy_`) go into the master, where they
        differ from it. A parameter that was given other storage (`param.data = ...`) is moved back into the buffer. Writing
        through `param.data` into the same storage cannot be noticed: use `deepspeed.utils.safe_set_full_fp32_param`.

        Raises:
            UsageError: the other storage has another dtype, device or shape.
        """
        noted = zip(self._params, self._addresses, self._versions, strict=True)
        for position, (param, address, version) in enumerate(noted):
            if param.data_ptr() != address:
                self._move_back(self.layout.slots[position])
            elif param._version == version:
                continue
            self._versions[position] = param._version
            self._adopt_rounded(self.layout.slots[position])

    def _move_back(self, slot: Slot) -> None:
        self._refuse_converted(slot)
        param = self.members[slot.index].param
        place = self.parameters_F[slot.start : slot.stop].view(param.shape)
        place.copy_(param.detach())
        param.data = place

    def _refuse_converted(self, slot: Slot) -> None:
        member, place = self.members[slot.index], self.parameters_F
        got = (member.param.dtype, member.param.device, member.param.numel())
        if got != (place.dtype, place.device, slot.numel):
            raise UsageError(
                f"parameter {member.name!r} became {got[2]} elements of {got[0]} on {got[1]} after initialize(), but its "
                f"engine trains {slot.numel} elements of {place.dtype} on {place.device}. Convert the model before "
                "initialize(), or call engine.destroy() first and initialize again."
            )

    def _adopt_rounded(self, slot: Slot) -> None:
        if self.parameters_F is not self.master_F:
            master, rounded = self.master_F[slot.start : slot.stop], self.parameters_F[slot.start : slot.stop]
            is_edited = master.to(rounded.dtype) != rounded
            master.copy_(torch.where(is_edited, rounded.to(master.dtype), master))

    def attach_gradients(self, reducer: FlatAllReducer) -> None:
        """Use `reducer.buffer` as the gradient buffer (once, before the first backward)."""
        self._reducer = reducer
        self._views = [self._view(slot) for slot in self.layout.slots]
        if self.accumulates_in_place:
            self.point_gradients()

    def _view(self, slot: Slot) -> Tensor:
        return self.gradients_F[slot.start : slot.stop].view(self.members[slot.index].param.shape)

    @property
    def reducer(self) -> FlatAllReducer:
        """The all-reducer over the gradient buffer."""
        assert self._reducer is not None  # engine.build attaches it before anything else sees the group
        return self._reducer

    @property
    def gradients_F(self) -> Tensor:
        """The flat gradient buffer, of the accumulation dtype."""
        return self.reducer.buffer

    @property
    def accumulates_in_place(self) -> bool:
        """True when `param.grad` can be a view: autograd insists on a gradient of the parameter's own dtype."""
        return self.gradients_F.dtype == self.parameters_F.dtype

    def point_gradients(self) -> None:
        """Make every `param.grad` the view of its place."""
        for slot, view in zip(self.layout.slots, self._views, strict=True):
            self.members[slot.index].param.grad = view

    def collect(self, first_slot: int = 0, last_slot: int | None = None) -> None:
        """Bring gradients that are not views into the buffer: `param.grad` is the truth wherever it is another tensor.

        A caller that ran `model.zero_grad()` detached the views: None then means zero; `model.to()` gives the views
        themselves other storage. With an accumulation dtype of its own every gradient arrives as a separate tensor, is
        added, and is dropped.

        Raises:
            UsageError: the parameter was converted to another dtype or device.
        """
        in_place, begin, itemsize = self.accumulates_in_place, self.gradients_F.data_ptr(), self.gradients_F.itemsize
        last_slot = len(self._params) if last_slot is None else last_slot
        for position in range(first_slot, last_slot):
            param, view, slot = self._params[position], self._views[position], self.layout.slots[position]
            grad = param.grad
            if grad is view:
                if slot.numel == 0 or view.data_ptr() == begin + slot.start * itemsize:
                    continue
                view = self._views[position] = self._view(slot)
            if in_place:
                self._refuse_converted(slot)
                if grad is None:
                    view.zero_()
                else:
                    view.copy_(grad.detach())
                param.grad = view
            elif grad is not None:
                view.add_(grad.detach())
                param.grad = None

    def clear_gradients(self) -> None:
        """Zero the buffer and point the gradients at it again."""
        self.gradients_F.zero_()
        for member in self.members:
            if member.param.grad is not None and not self.accumulates_in_place:
                member.param.grad = None
        if self.accumulates_in_place:
            self.point_gradients()

    def named_slices(self, flat_F: Tensor) -> Iterator[tuple[NamedParameter, Tensor]]:
        """Each member with its part of `flat_F`, in the parameter's own shape."""
        for slot in self.layout.slots:
            member = self.members[slot.index]
            yield member, flat_F[slot.start : slot.stop].view(member.param.shape)

    def write_back(self, start: int, stop: int) -> None:
        """Round elements `[start, stop)` of the master into the parameters."""
        if self.parameters_F is not self.master_F:
            self.parameters_F[start:stop].copy_(self.master_F[start:stop])

    def release(self) -> None:
        """Let go of gradients and back-references; the model keeps its values and works on without an engine."""
        for member in self.members:
            if owner_of(member.param) is self:  # else a newer engine has it, with its gradients
                delattr(member.param, _OWNER)
                member.param.grad = None
        self._views = []
        if self._reducer is not None:
            self._reducer.close()


def release_owner(param: nn.Parameter) -> None:
    """Detach `param` from the engine it belonged to, if any: wrapping a model again replaces the earlier engine."""
    owner = owner_of(param)
    if owner is not None:
        owner.on_replaced()


def place_of(param: nn.Parameter) -> tuple[FlatGroup, int] | None:
    """The flat group that `param` lives in and the position of its slot there; None when no engine trains it."""
    place: Place | None = getattr(param, _OWNER, None)
    group = place.group_of(param) if place is not None else None
    return None if place is None or group is None else (group, place.position)


def owner_of(param: nn.Parameter) -> FlatGroup | None:
    """The flat group that `param` lives in; None for a parameter that no engine trains."""
    found = place_of(param)
    return None if found is None else found[0]
