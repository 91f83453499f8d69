"""Packages whose names load when first used (PEP 562).

Lives here: the function that makes the two hooks, and modules that can be called. Who calls it: `deepspeed/__init__.py` and
the door packages, so that `import deepspeed` loads nothing, while `deepspeed.runtime.utils.see_memory_usage` still works.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

__all__ = ["attach", "make_callable"]


def attach(
    package_name: str,
    submodules: tuple[str, ...] = (),
    names: Mapping[str, str] | None = None,
    unbuilt: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the module-level `__getattr__` and `__dir__` of a package.

        __getattr__, __dir__ = attach(__name__, submodules=("engine",), names={"Engine": "deepspeed.engine.engine:Engine"})

    A name is imported at its first use and then bound in the package, so that later uses are plain attribute look-ups and
    a client may replace it by assignment.

    Args:
        package_name: `__name__` of the package.
        submodules: sub-modules of the package that attribute access imports.
        names: public name -> `module:attribute`, or `module` for the module itself.
        unbuilt: documented names that this version does not have -> the sentence that says so.

    Returns:
        `(__getattr__, __dir__)`. The first raises AttributeError for every other name, with the sentence for unbuilt ones.
    """
    targets = {name: f"{package_name}.{name}" for name in submodules} | dict(names or {})
    missing = unbuilt or {}

    def module_getattr(name: str) -> Any:
        if name not in targets:
            reason = missing.get(name, f"module {package_name!r} has no attribute {name!r}")
            raise AttributeError(reason, name=name, obj=sys.modules.get(package_name))
        module_name, _, attribute = targets[name].partition(":")
        module = importlib.import_module(module_name)
        value = getattr(module, attribute) if attribute else module
        setattr(sys.modules[package_name], name, value)
        return value

    def module_dir() -> list[str]:
        return sorted({*vars(sys.modules[package_name]), *targets})

    return module_getattr, module_dir


def make_callable(module_name: str, function: Callable[..., Any]) -> None:
    """Let calling the loaded module `module_name` call `function`: for a name published as a module and as a function.

    Importing a submodule sets its name in the package, so a function of that name there would not last.
    """
    module = sys.modules[module_name]

    def call(_: ModuleType, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    module.__class__ = type(module.__class__.__name__, (ModuleType,), {"__call__": call})
