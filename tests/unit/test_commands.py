"""Which heavy libraries each command loads: one that needs none answers at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "numpy", "pandas", "triton", "sympy", "matplotlib", "scipy", "jinja2", "safetensors")
_RUN = """
import importlib, json, sys
module, function, *words = sys.argv[1:]
sys.argv[1:] = words
try:
    status = getattr(importlib.import_module(module), function)()
except SystemExit as end:
    status = end.code
assert status in (None, 0), status
sys.stderr.write(json.dumps([name for name in %r if name in sys.modules]))
"""


def _loaded(target: str, words: list[str]) -> set[str]:
    """Heavy libraries that a command has loaded when it ends."""
    command = [sys.executable, "-c", _RUN % (HEAVY,), *target.split(":"), *words]
    environ = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return set(json.loads(done.stderr.splitlines()[-1]))


_RUNNER = "deepspeed.launcher.runner:main"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (_RUNNER, "--help"),
        (_RUNNER, "plan --help"),
        (_RUNNER, "plan --params 70e9 --world-size 64 --device-memory 80GB"),
        (_RUNNER, "plan --params 7e9 --world-size 8 --dtype fp32 --optimizer Lion --json"),
        (_RUNNER, "--check --help"),
        ("deepspeed.config.check:main", "--help"),
        ("deepspeed.config.check:main", "reference"),
        ("deepspeed.pipe.command:main", "--help"),
        ("deepspeed.elasticity.command:main", "--help"),
        ("deepspeed.launcher.ssh_command:main", "--help"),
    ],
)
def test_a_command_loads_nothing_heavy(target: str, words: str) -> None:
    assert _loaded(target, words.split()) == set()


@pytest.mark.parametrize(
    "target",
    [
        "deepspeed.bench.command:main",
        "deepspeed.checkpoint.ds_to_universal:main",
        "deepspeed.checkpoint.tools.main:main",
        "deepspeed.env_report:cli_main",
        "deepspeed.nvme.io_command:main",
        "deepspeed.nvme.tune_command:main",
    ],
)
def test_a_command_that_works_on_tensors_loads_torch_and_nothing_else(target: str) -> None:
    assert _loaded(target, ["--help"]) == {"torch", "numpy"}  # numpy: by torch


@pytest.mark.parametrize("words", ["report --help", "top --help"])
def test_readers_of_run_logs_load_numpy_for_their_columns_and_nothing_else(words: str) -> None:
    assert _loaded(_RUNNER, words.split()) == {"numpy"}
