"""Modules that stage 3 gathers as one unit, with everything below them.

    set_z3_leaf_modules(model, [MoEBlock])    before initialize; also by class name, module name or suffix, or by the config
        module._z3_leaf = True                read by `zero.units` when the engine is built, and by clients

For modules of which the data choose the parts that run (experts): gathered part by part, ranks would wait for each other.

Lives here: choosing and marking. Called by clients under `deepspeed.utils`, and by `engine.build` for the config's block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from deepspeed.common.logging import warn_once
from deepspeed.config.zero import LeafModuleConfig
from deepspeed.errors import ArgumentError

__all__ = [
    "apply_leaf_config",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_MARK = "_z3_leaf"
_Matches = Callable[[str, nn.Module], bool]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether `model` is marked as one unit."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model_parameter: nn.Parameter) -> bool:
    """Whether the parameter lay in a module marked as one unit when that was marked."""
    return bool(getattr(model_parameter, _MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules marked as one unit, in the model's order."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this one module, or take its mark away."""
    _mark(model, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of the given classes. Call before `initialize`, on all ranks.

    Args:
        model: the model.
        leaf_module_classes: classes (subclasses count too), names of classes, or full names (`package.module.Class`).
        raise_if_not_found: refuse a call that marks nothing.

    Returns:
        The marked modules, in the model's order.

    Raises:
        ArgumentError: nothing fits; also a ValueError.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks of `set_z3_leaf_modules` away; arguments, result and errors are the same."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these names, as `model.named_modules()` spells them, or take their marks away.

    Raises:
        ArgumentError: nothing fits; also a ValueError.
    """
    wanted = _texts("set_z3_leaf_modules_by_name", module_names)
    return _mark_all(model, lambda name, _: name in wanted, flag, wanted if raise_if_not_found else None)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules whose names end so ("mlp.experts"), or take their marks away.

    Raises:
        ArgumentError: nothing fits; also a ValueError.
    """
    endings = _texts("set_z3_leaf_modules_by_suffix", module_name_suffixes)
    return _mark_all(model, lambda name, _: name.endswith(tuple(endings)), flag, endings if raise_if_not_found else None)


def apply_leaf_config(model: nn.Module, choice: LeafModuleConfig) -> list[nn.Module]:
    """Mark what the config asks for; return the modules. What was written there and fits nothing is warned of."""
    found: list[nn.Module] = []
    for field, mark in (
        ("classes", set_z3_leaf_modules),
        ("names", set_z3_leaf_modules_by_name),
        ("name_suffixes", set_z3_leaf_modules_by_suffix),
    ):
        for entry in getattr(choice, field):
            marked = mark(model, [entry], raise_if_not_found=False)
            found += marked
            if not marked and field in choice.model_fields_set:
                key = f"zero_optimization.leaf_module.{field}"
                warn_once((key, entry), "%s holds %r, which fits no module of the model: correct it", key, entry)
    return found


def _mark_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    wrong = [given for given in classes if not isinstance(given, str | type)]
    if wrong or isinstance(classes, str):
        raise ArgumentError(
            f"leaf module classes {classes!r}: needed a list of classes or of their names. Write [MoEBlock] or ['MoEBlock']."
        )
    types = tuple(given for given in classes if isinstance(given, type))
    names = {given for given in classes if isinstance(given, str)}

    def fits(_: str, module: nn.Module) -> bool:
        cls = type(module)
        spellings = {cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}"}
        return isinstance(module, types) or bool(names & spellings)

    wanted = [given if isinstance(given, str) else given.__name__ for given in classes]
    return _mark_all(model, fits, flag, wanted if raise_if_not_found else None)


def _mark_all(model: nn.Module, fits: _Matches, flag: bool, wanted: Iterable[str] | None) -> list[nn.Module]:
    """Mark what fits. `wanted` is named in the error when nothing does; None accepts that."""
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found and wanted is not None:
        raise ArgumentError(
            f"no module of {type(model).__name__} fits {sorted(wanted)}; needed one at least. Look at "
            "[(name, type(m)) for name, m in model.named_modules()], or pass raise_if_not_found=False."
        )
    for module in found:
        _mark(module, flag)
    return found


def _mark(module: nn.Module, flag: bool) -> None:
    setattr(module, _MARK, flag)
    for param in module.parameters():
        setattr(param, _MARK, flag)


def _texts(function: str, given: Sequence[str]) -> list[str]:
    if isinstance(given, str) or not all(isinstance(item, str) for item in given):
        raise ArgumentError(f"{function}(..., {given!r}): needed a list of texts. Write {[str(given)]}.")
    return list(given)
