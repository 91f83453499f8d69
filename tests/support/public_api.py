"""Every public name and signature as text, one a line: `python -m tests.support.public_api > tests/public_api.txt`.

Public are the names in `__all__` of the modules below, and the methods of their classes that do not begin with an
underscore and are written in this package. Fields of config models are listed in the config reference instead.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

from pydantic import BaseModel

ROOTS = (
    "deepspeed",
    "deepspeed.accelerator",
    "deepspeed.checkpoint",
    "deepspeed.comm",
    "deepspeed.config",
    "deepspeed.env_report",
    "deepspeed.errors",
    "deepspeed.io",
    "deepspeed.moe.experts",
    "deepspeed.moe.layer",
    "deepspeed.moe.mappings",
    "deepspeed.moe.sharded_moe",
    "deepspeed.moe.utils",
    "deepspeed.monitor",
    "deepspeed.nvme",
    "deepspeed.ops",
    "deepspeed.ops.adagrad",
    "deepspeed.ops.adam",
    "deepspeed.ops.lamb",
    "deepspeed.ops.lion",
    "deepspeed.ops.op_builder",
    "deepspeed.ops.aio",  # after the room that its builder comes from
    "deepspeed.ops.quantizer",
    "deepspeed.pipe",
    "deepspeed.pipe.grid",
    "deepspeed.pipe.orders",
    "deepspeed.pipe.partition",
    "deepspeed.pipe.schedule",
    "deepspeed.profiling.flops_profiler",
    "deepspeed.sequence",
    "deepspeed.sequence.cross_entropy",
    "deepspeed.sequence.layer",
    "deepspeed.zero",
)
DOORS = ("deepspeed.runtime", "deepspeed.utils")


def lines() -> Iterator[str]:
    """Yield the lines in order of module and name. An object met before is given as `= its first name`."""
    seen: dict[int, str] = {}
    for module_name in (*ROOTS, *_doors()):
        module = importlib.import_module(module_name)
        for name in sorted(getattr(module, "__all__", ())):
            value = getattr(module, name)
            path = f"{module_name}.{name}"
            if inspect.ismodule(value):
                yield path if value.__name__ == path else f"{path} = {value.__name__}"
            elif (inspect.isclass(value) or inspect.isroutine(value)) and id(value) in seen:
                yield f"{path} = {seen[id(value)]}"
            else:
                seen[id(value)] = path
                yield from _describe(path, value)


def _doors() -> Iterator[str]:
    for name in DOORS:
        package = importlib.import_module(name)
        yield name
        yield from sorted(found.name for found in pkgutil.walk_packages(package.__path__, f"{name}."))


def _describe(path: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"class {path}{_signature(value)}"
        if not issubclass(value, BaseModel | Exception):
            yield from _members(path, value)
    elif inspect.isroutine(value):
        yield path + _signature(value)
    else:
        kind = type(value)
        yield f"{path}: {'type alias' if kind.__module__ in ('collections.abc', 'typing', 'types') else kind.__name__}"


def _members(path: str, cls: type) -> Iterator[str]:
    ours = {name for base in cls.__mro__ if base.__module__.startswith("deepspeed") for name in vars(base)}
    for name in sorted(name for name in ours if not name.startswith("_")):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, property):
            yield f"{path}.{name} (property)"
        elif inspect.isroutine(getattr(cls, name)):
            yield f"{path}.{name}{_signature(getattr(cls, name))}"
        else:
            yield f"{path}.{name}: {type(member).__name__}"


def _signature(value: object) -> str:
    if inspect.isclass(value) and issubclass(value, BaseModel | Exception):
        return ""
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no signature: a class made in C, an enum
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


if __name__ == "__main__":
    print("\n".join(lines()))
