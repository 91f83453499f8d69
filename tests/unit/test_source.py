"""The package's source keeps the limits that no linter holds. What is over a size misses a noun."""

from __future__ import annotations

import ast
from pathlib import Path

import deepspeed

_FILES = sorted(Path(deepspeed.__file__).parent.rglob("*.py"))


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


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the end, docstring included."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1
