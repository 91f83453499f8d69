"""Questions to the machine that builders pass on: commands on PATH, functions in shared libraries.

Not here: what an operator needs. Called by `builder`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["has_command", "has_function"]


def has_command(names: Sequence[str]) -> bool:
    """Whether one of `names` is a command on PATH."""
    return any(shutil.which(name) for name in names)


def has_function(function: str, libraries: Sequence[str], folders: Sequence[str]) -> bool:
    """Whether one of the shared libraries exports `function`; libraries that do not load have none."""
    return any(_exports(path, function) for name in libraries for path in _paths(name, folders))


def _paths(name: str, folders: Sequence[str]) -> Iterator[str]:
    for folder in folders:
        yield from (str(path) for path in sorted(Path(folder).glob(f"lib{name}.so*")))
    found = ctypes.util.find_library(name)
    if found is not None:
        yield found


def _exports(path: str, function: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(path), function)
    except OSError:
        return False
