"""Names and tensors of a module that no flat group manages, and names that several readers of a module need.

Does not live here: flat groups (`zero.flat`). Called by `saving`, `loading` and `whole_model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn

from deepspeed.common.wording import some

__all__ = ["extra_state", "persistent_buffers", "set_extra_state", "shared_names", "some_names", "unmanaged_parameters"]

_NAMES_SHOWN = 5


def unmanaged_parameters(
    module: nn.Module, managed: Set[str], *, exclude_frozen: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Parameters that are not in `managed`."""
    for name, param in module.named_parameters():
        if name not in managed and (param.requires_grad or not exclude_frozen):
            yield name, param.detach()


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a state dict holds, by name."""
    stored = set(module.state_dict(keep_vars=True))
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def shared_names(module: nn.Module) -> dict[str, str]:
    """Second and later names of tied parameters and buffers -> their first name."""
    first = {id(tensor): name for name, tensor in (*module.named_parameters(), *persistent_buffers(module))}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in every if first.get(id(tensor), name) != name}


def extra_state(module: nn.Module) -> dict[str, Any]:
    """What modules keep besides tensors, by module name (torch's `get_extra_state`)."""
    return {name: m.get_extra_state() for name, m in module.named_modules() if _has_extra_state(m)}


def set_extra_state(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Inverse of `extra_state`, for the modules that both know."""
    for name, m in module.named_modules():
        if name in states and _has_extra_state(m):
            m.set_extra_state(states[name])


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def some_names(found: list[str]) -> str:
    """The first names of a list, for an error text."""
    return some([repr(name) for name in found], _NAMES_SHOWN, "nothing")
