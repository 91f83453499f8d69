"""The hooks of stage 3: which moment of which module calls which method of the coordinator.

    modules of a unit    before_forward of the first, after_forward of the last; ordinary torch hooks
    trained parameter    before_accumulate                  a gradient is about to be stored

Hooks on tensors come and go with each forward; `zero.coordinator` makes them, since only a forward has tensors.

Lives here: putting hooks on and taking them off, in one place; the handles are kept. Does not live here: what happens at a
moment. Called by `zero.coordinator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from deepspeed.common.compiling import not_compiled
from deepspeed.zero.states import Piece, Unit

__all__ = ["Moments", "UnitHooks"]


class Moments(Protocol):
    """Who is told."""

    def before_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first module of `unit` is about to run."""

    def after_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Its last module has run, or raised."""

    def before_accumulate(self, unit: Unit, piece: Piece, index: int, grad: Tensor) -> None:
        """The gradient of member `index` of `piece` is about to be stored."""


class UnitHooks:
    """Hooks on the modules and parameters of units. torch.compile does not look into them: the graph breaks around each."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self.on_modules: list[Any] = []
        """Handles. A client may remove them all and put an empty list here (`zero.parameter_offload`)."""
        self.on_parameters: list[Any] = []
        """Likewise."""

    @property
    def are_on(self) -> bool:
        """Whether there are any."""
        return bool(self.on_modules or self.on_parameters)

    def install(self, units: Sequence[Unit]) -> None:
        """Put hooks on `units`, which have none."""
        for unit in units:
            self._install(unit)

    def _install(self, unit: Unit) -> None:
        before = not_compiled(partial(self._moments.before_forward, unit))
        after = not_compiled(partial(self._moments.after_forward, unit))
        self.on_modules.append(unit.modules[0].register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self.on_modules.append(unit.modules[-1].register_forward_hook(after, always_call=True))
        for piece in unit.pieces:
            for index, member in enumerate(piece.members):
                if member.param.requires_grad:
                    hook = partial(self._moments.before_accumulate, unit, piece, index)
                    self.on_parameters.append(member.param.register_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take every hook off."""
        for handles in (self.on_modules, self.on_parameters):
            for handle in handles:
                handle.remove()
            handles.clear()
