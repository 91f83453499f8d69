"""The package's source keeps the limits that no linter holds. What is over a size misses a noun."""

from __future__ import annotations

import ast
from pathlib import Path

import deepspeed

_FILES = sorted(Path(deepspeed.__file__).parent.rglob("*.py"))
_OLDEST = (3, 10)
"""The oldest Python that pyproject.toml admits; on it the rest of what is here shows by running the tests."""


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in _FILES}
    assert len(lengths) > 100
    assert {path: length for path, length in lengths.items() if length > 600} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    lengths = {
        f"{path}: {node.name}": _length(node)
        for path in _FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 1000
    assert {function: length for function, length in lengths.items() if length > 60} == {}


def test_exceptions_from_lint_rules_stand_in_pyproject_with_their_reason() -> None:
    """Not in the source: there nobody sees how many there are."""
    assert [str(path) for path in _FILES if "noqa" in path.read_text()] == []


def test_the_oldest_python_reads_every_file() -> None:
    root = Path(__file__).parents[2]
    assert f'requires-python = ">={_OLDEST[0]}.{_OLDEST[1]}"' in (root / "pyproject.toml").read_text()
    for path in (*_FILES, *sorted((root / "tests").rglob("*.py")), *sorted((root / "benchmarks").rglob("*.py"))):
        ast.parse(path.read_text(), filename=str(path), feature_version=_OLDEST)


def test_no_annotation_is_a_bare_qualifier() -> None:
    """Python 3.10 evaluates `ClassVar` and `Final` in a string with something in brackets behind them, or not at all."""
    annotated = {
        f"{path}:{node.lineno}": ast.unparse(node.annotation)
        for path in _FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign)
    }
    assert sum(text.startswith("ClassVar[") for text in annotated.values()) > 50
    assert {where: text for where, text in annotated.items() if text.split(".")[-1] in ("ClassVar", "Final")} == {}


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the end, docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1
