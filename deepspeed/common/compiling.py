"""What torch.compile must not look into: exchanges between ranks, and what has to be as it is in Python.

    @not_compiled
    def exchange(...)          the graph breaks around it: what is called from a compiled model runs as without

Lives here: the mark. Called by rooms whose functions are reached from a user's compiled forward.

[Note: dynamo is loaded by others] `torch.compiler.disable` imports torch._dynamo, which takes seconds. Nothing compiles
before somebody has loaded it, so the compiler is told at the first call after that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["not_compiled"]

P = ParamSpec("P")
R = TypeVar("R")


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` such that torch.compile leaves it, and all that it calls, as they are.

    What it calls and was compiled by itself (`torch.compile(f)`) stays so. See [Note: dynamo is loaded by others].
    """
    hidden: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hidden:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            hidden.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return hidden[0](*args, **kwargs)

    return call
