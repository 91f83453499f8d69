"""`optimizer.parameter_offload`: stage 3's hooks, for clients that take them off and put them on again.

    with GatheredParameters(model.parameters()):
        offload = engine.optimizer.parameter_offload
        every handle of offload.forward_hooks and offload.backward_hooks: remove()       both lists emptied
        generate: hundreds of forwards over whole parameters, with no hook in between
        offload._register_deepspeed_module(offload.module)                               as before

Lives here: the names that clients of the original use. Does not live here: the hooks (`zero.hooks`), the order of uses
(`zero.trace`). An attribute of the engine's optimizer at stage 3 and nowhere else: clients ask for it. Where every
parameter is small enough to stay whole, there are no hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.zero.coordinator import ParameterCoordinator
from deepspeed.zero.hooks import UnitHooks
from deepspeed.zero.pool import UnitPool
from deepspeed.zero.states import Unit

__all__ = ["ParameterOffload"]


class _Nothing:
    """In place of hooks, and of the pool that knows the order of uses, where nothing is sharded."""

    knows_order = False

    def __init__(self) -> None:
        self.on_modules: list[Any] = []
        self.on_parameters: list[Any] = []

    def install(self, units: Sequence[Unit]) -> None:
        pass

    def remove(self) -> None:
        pass

    def forget_order(self) -> None:
        pass


class ParameterOffload:
    """The hooks of one model at stage 3. All ranks do the same with it, between forward passes.

    Attributes:
        module: the model that the hooks are on.
        param_coordinator: the recorded order of uses.
    """

    def __init__(self, module: nn.Module, coordinator: ParameterCoordinator | None) -> None:
        """Take the model and what shards its parameters, if anything does."""
        self.module = module
        self._hooks: UnitHooks | _Nothing
        self._units: Sequence[Unit]
        if coordinator is None:
            self._hooks = nothing = _Nothing()
            self._units = ()
            self.param_coordinator = _Order(nothing)
        else:
            self._hooks = coordinator.hooks
            self._units = coordinator.pool.units
            self.param_coordinator = _Order(coordinator.pool)

    @property
    def forward_hooks(self) -> list[Any]:
        """Handles of the hooks on modules; may be replaced by an empty list when all are removed."""
        return self._hooks.on_modules

    @forward_hooks.setter
    def forward_hooks(self, handles: list[Any]) -> None:
        self._hooks.on_modules = handles

    @property
    def backward_hooks(self) -> list[Any]:
        """Handles of the hooks on parameters; likewise."""
        return self._hooks.on_parameters

    @backward_hooks.setter
    def backward_hooks(self, handles: list[Any]) -> None:
        self._hooks.on_parameters = handles

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks on again, each once, whichever are still there.

        Raises:
            ArgumentError: not the model; hooks belong to units, which may span modules.
        """
        if module is not self.module:
            raise ArgumentError(
                f"_register_deepspeed_module(a {type(module).__name__}): hooks are put on the whole model at once. "
                "Give it optimizer.parameter_offload.module."
            )
        self._hooks.remove()
        self._hooks.install(self._units)


class _Order:
    """What was recorded about the order in which parameters are used."""

    def __init__(self, pool: UnitPool | _Nothing) -> None:
        self._pool = pool

    def is_invalid_trace(self) -> bool:
        """Whether the order of this kind of pass is not known, so that nothing is gathered ahead."""
        return not self._pool.knows_order

    def _invalidate_trace(self) -> None:
        """Forget the order: the next pass records it anew. All ranks call it, since gathering ahead is collective."""
        self._pool.forget_order()
