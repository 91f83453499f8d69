"""A pytest plug-in (`-p no_gpu`) for the clients' tests: runs named ones on a CPU, and tells which passed.

    SUITE_REPORT       file to which "passed NAME" and "failed NAME" are added; a test that skipped is neither
    SUITE_WITHOUT_GPU  names of tests, with commas between, whose skip for want of a GPU is lifted
    SUITE_CLIENT       whose tests they are: checks at their import are lifted for that client alone

A skip is lifted only where a test names no device itself: what it trains or stores is the same on a CPU.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

_WITHOUT_GPU = frozenset(filter(None, os.environ.get("SUITE_WITHOUT_GPU", "").split(",")))


def pytest_configure() -> None:
    """Before the clients' tests are imported: checks that decide while a module is."""
    lifts = {"transformers": _tests_of_transformers_run, "peft": _modules_of_peft_run}
    if _WITHOUT_GPU and (lift := lifts.get(os.environ.get("SUITE_CLIENT", ""))):
        lift()


def _tests_of_transformers_run() -> None:
    """Its decorators put a function that skips in the place of the test, so the decorators stand back. The tests that run
    here resize embeddings sharded over one rank, on `torch_device`, which is the CPU."""
    utils = importlib.import_module("transformers.testing_utils")
    for name in ("require_torch_accelerator", "require_torch_multi_accelerator"):
        setattr(utils, name, lambda test: test)


def _modules_of_peft_run() -> None:
    """`tests/test_gpu_examples.py` skips as a whole where there is no GPU; the one test that runs of it needs none."""
    skip: Any = pytest.skip

    def skip_or_go_on(reason: str = "", *, allow_module_level: bool = False) -> None:
        if not (allow_module_level and "hardware accelerator" in reason):
            skip(reason, allow_module_level=allow_module_level)

    pytest.skip = skip_or_go_on  # type: ignore[assignment]


def pytest_itemcollected(item: pytest.Item) -> None:
    """PEFT marks tests that need a GPU with a condition."""
    if item.name in _WITHOUT_GPU:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "skipif"]


_outcomes: dict[str, list[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each part of a test ended: set-up, the test, its sub-tests, tear-down."""
    _outcomes.setdefault(report.nodeid, []).append(report.outcome)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write the test's line: a later one may take too long, or end the process."""
    outcomes = _outcomes.pop(nodeid, [])
    with Path(os.environ["SUITE_REPORT"]).open("a") as file:
        if "failed" in outcomes:
            file.write(f"failed {nodeid}\n")
        elif "skipped" not in outcomes:
            file.write(f"passed {nodeid}\n")
