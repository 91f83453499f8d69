"""The three places that know the documented variables say the same: registry, csrc/package and pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.ops.op_builder import ALL_OPS

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli", reason="reads pyproject.toml, which needs Python 3.11 or the package tomli")

REPOSITORY = Path(__file__).parents[3]


def _of_cmake() -> dict[str, tuple[str, str]]:
    """Operator and kind by variable, from csrc/package/operators.cmake."""
    text = (REPOSITORY / "csrc/package/operators.cmake").read_text()
    return {f"DS_BUILD_{suffix}": (name, kind) for suffix, name, kind in re.findall(r'"(\w+) (\w+) (\w+)"', text)}


def test_the_build_knows_every_operator_and_what_there_is_of_it() -> None:
    wanted = {
        op.BUILD_VAR: (op.NAME, "native" if op.FOLDER else "served" if op.SERVED_BY else "none") for op in ALL_OPS.values()
    }
    assert _of_cmake() == wanted


def test_each_native_operator_has_the_folder_that_the_library_compiles_for_it() -> None:
    text = (REPOSITORY / "csrc/CMakeLists.txt").read_text()
    assert dict(re.findall(r"set\(DS_FOLDER_(\w+) (\w+)\)", text)) == {
        name: op.FOLDER for name, op in ALL_OPS.items() if op.FOLDER
    }


def test_an_installation_without_cmake_is_refused_when_the_library_was_asked_for() -> None:
    settings: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["scikit-build"]
    (override,) = settings["overrides"]
    asked = {variable for variable, (_, kind) in _of_cmake().items() if kind != "served"} | {"DS_BUILD_OPS"}
    assert override["if"] == {"failed": True, "env": dict.fromkeys(asked, False)}
