"""What the installation wrote down about the native library: a generated module, `_build_record`, of plain values.

Not here: whether the library loads (`library`). Written by csrc/package/record.cmake.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import NamedTuple

__all__ = ["BuildRecord", "build_record"]

_MODULE = "deepspeed.ops.native._build_record"


class BuildRecord(NamedTuple):
    """What came of the build."""

    absence: str
    """Why there is no library, as half a sentence after "the native library is absent: "; empty when there is one."""

    operators: tuple[str, ...]
    """Operators that were to go in."""

    sources: tuple[str, ...]
    """Files that were compiled, as paths in the repository."""

    notes: tuple[str, ...]
    """What a person should know of the settings that were given."""


@cache
def build_record() -> BuildRecord:
    """Read it. Where there is none, the package was never installed, and the record says so."""
    try:
        found = importlib.import_module(_MODULE)
    except ModuleNotFoundError:
        why = "this package is used from its sources, without being installed"
        return BuildRecord(why, (), (), ())
    return BuildRecord(found.ABSENCE, tuple(found.OPERATORS), tuple(found.SOURCES), tuple(found.NOTES))
