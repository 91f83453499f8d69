"""The places that know the documented variables and operators say the same: registry, csrc/package, csrc/CMakeLists.txt."""

from __future__ import annotations

import re
from pathlib import Path

from deepspeed.ops.op_builder import ALL_OPS

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


def test_what_ds_report_says_of_the_twins_is_what_the_guide_says() -> None:
    text = (REPOSITORY / "docs/guide/native-library.md").read_text()
    table = text[text.index("## What it costs to be without") : text.index("## Builders")]
    for op in ALL_OPS.values():
        rows = [row for row in table.splitlines() if f"`{op.NAME}`" in row]
        assert [op.TWIN_COST in row for row in rows] == ([True] if op.TWIN_COST else [])
