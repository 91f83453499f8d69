"""Operators: optimizers, and the table that describes what there is (`op_builder`).

`__compatible_ops__` maps the name of every documented operator to whether this machine can use it.
"""

from __future__ import annotations

from typing import Any

from deepspeed.common.lazy import attach
from deepspeed.ops.op_builder import compatible_ops

__all__: list[str] = []

_load_submodule, __dir__ = attach(__name__, submodules=("adagrad", "adam", "aio", "lamb", "lion"))


def __getattr__(name: str) -> Any:
    if name == "__compatible_ops__":
        return compatible_ops()
    return _load_submodule(name)
