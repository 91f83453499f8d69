"""Parameters that a module uses although another module owns them.

    register_external_parameter(decoder, embedding.weight)
        decoder.ds_external_parameters()  ->  ("0", embedding.weight)         what clients iterate over
        external_parameters_of(decoder)   ->  (embedding.weight,)             what is gathered before `decoder` runs

A coordinator that holds the parameter is told of each change.

Lives here: the table that each module carries. Does not live here: finding such parameters while a forward runs
(`zero.lookups`), gathering them (`zero.coordinator`). Called by clients, by `zero.init_context` and by the coordinator.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from torch import nn

from deepspeed.errors import ArgumentError
from deepspeed.zero.holder import holder_of

__all__ = [
    "attach_external_tables",
    "external_parameters_of",
    "register_external_parameter",
    "unregister_external_parameter",
]

_TABLE = "ds_external_parameters"


@runtime_checkable
class ExternalUses(Protocol):
    """A holder that gathers a parameter for modules that do not own it."""

    def register_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """Gather `param` whenever `module` runs."""

    def unregister_external(self, module: nn.Module, param: nn.Parameter) -> None:
        """Undo `register_external`."""


class ExternalParameters:
    """The table of one module. Calling it iterates over (name, parameter), as the published method does.

    It lies in the module's `__dict__`, so that a deep copy of the module points at the copied parameters, and pickles as a
    plain dict, so that a saved model loads where this package is not installed.
    """

    def __init__(self) -> None:
        self.params: list[nn.Parameter] = []

    def __call__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter([(str(position), param) for position, param in enumerate(self.params)])

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExternalParameters:
        copied = ExternalParameters()
        copied.params = copy.deepcopy(self.params, memo)
        return copied


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather `parameter` whenever `module` runs, though it is not one of its own. Registering twice is once.

    Raises:
        ArgumentError: the arguments are no module and no parameter.
    """
    _refuse_others("register_external_parameter", module, parameter)
    params = _table(module).params
    if not any(known is parameter for known in params):
        params.append(parameter)
        holder: object = holder_of(parameter)
        if isinstance(holder, ExternalUses):
            holder.register_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Raises:
        ArgumentError: the arguments are no module and no parameter, or it was not registered.
    """
    _refuse_others("unregister_external_parameter", module, parameter)
    table = _table(module)
    kept = [known for known in table.params if known is not parameter]
    if len(kept) == len(table.params):
        raise ArgumentError(
            f"unregister_external_parameter({type(module).__name__}, ...): that parameter is not registered there. "
            "Pass the module and the parameter that register_external_parameter() got."
        )
    table.params = kept
    holder: object = holder_of(parameter)
    if isinstance(holder, ExternalUses):
        holder.unregister_external(module, parameter)


def external_parameters_of(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """What was registered for `module`, in order."""
    table = vars(module).get(_TABLE)
    return tuple(table.params) if isinstance(table, ExternalParameters) else ()


def attach_external_tables(modules: Iterable[nn.Module]) -> None:
    """Give each module the method `ds_external_parameters()`; tables that exist are kept."""
    for module in modules:
        _table(module)


def _table(module: nn.Module) -> ExternalParameters:
    table = vars(module).get(_TABLE)
    if not isinstance(table, ExternalParameters):
        table = vars(module)[_TABLE] = ExternalParameters()
    return table


def _refuse_others(function: str, module: object, parameter: object) -> None:
    if not (isinstance(module, nn.Module) and isinstance(parameter, nn.Parameter)):
        raise ArgumentError(
            f"{function}() was given a {type(module).__name__} and a {type(parameter).__name__}; needed a torch.nn.Module "
            "and a torch.nn.Parameter. Pass the module that uses the parameter first."
        )
