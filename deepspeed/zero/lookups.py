"""`module.weight` of a sharded parameter, noticed when it is looked up.

    h = block(x)
    F.linear(h, self.wte.weight)     __getattr__ -> module._parameters["weight"] -> coordinator.looked_up(unit of wte)

Lives here: the dict that takes the place of `module._parameters`, and putting it there. It is an ordinary dict in every
respect but that reading one item tells the coordinator: iterating (`named_parameters`, `state_dict`, `_apply`) does not.
A copy and a pickle of it are plain dicts. Does not live here: what a look-up means (`zero.coordinator`, the caller).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from deepspeed.zero.states import Unit

__all__ = ["unwatch_lookups", "watch_lookups"]


class _WatchedParameters(dict[str, Any]):
    """`module._parameters`, telling when a parameter is read whose unit no running module has taken."""

    def __init__(self, plain: Mapping[str, Any], units: Mapping[int, Unit], looked_up: Callable[[Unit], None]) -> None:
        super().__init__(plain)
        self._units = units
        self._looked_up = looked_up

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        unit = self._units.get(id(param))
        if unit is not None and not unit.users:
            self._looked_up(unit)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(param, memo) for name, param in self.items()}

    def __copy__(self) -> dict[str, Any]:
        return dict(self.items())

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


def watch_lookups(root: nn.Module, units: Mapping[int, Unit], looked_up: Callable[[Unit], None]) -> None:
    """Watch every module that holds a sharded parameter.

    Args:
        root: the model.
        units: `id(param)` -> its unit; read at each look-up.
        looked_up: called with the unit of a parameter that is read while the unit has no users.
    """
    for module in root.modules():
        if any(id(param) in units for param in module._parameters.values()):
            module._parameters = _WatchedParameters(module._parameters, units, looked_up)


def unwatch_lookups(root: nn.Module) -> None:
    """Give every module a plain dict again."""
    for module in root.modules():
        if isinstance(module._parameters, _WatchedParameters):
            module._parameters = module._parameters.copy()
