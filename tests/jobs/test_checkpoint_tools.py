"""`deepspeed-checkpoint` as a whole command, and how much memory it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.tool_checkpoints import save

_LARGE_NUMEL = 12_000_000
_MEASURE = """
import sys
from deepspeed.checkpoint.tools import main
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
statuses = [main(["ls", sys.argv[1]]), main(["diff", sys.argv[3], sys.argv[3]])]  # so that all code is loaded
before = peak()
statuses += [main(["diff", sys.argv[1], sys.argv[2]]), main(["verify", sys.argv[1]])]
print(statuses, peak() - before)
"""


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def test_the_command_prints_what_it_found_and_its_status_says_whether_all_is_well(tmp_path: Path) -> None:
    folder = save(tmp_path, "step7", global_steps=7)
    (folder / "client_state.json").write_text("{}")
    command = [sys.executable, "-m", "deepspeed.checkpoint.tools", "verify", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["tags"][0]["faults"][0].startswith("client_state.json")


def test_comparing_and_verifying_take_a_few_blocks_of_memory_whatever_the_tensors(tmp_path: Path) -> None:
    large = {"master/large": torch.zeros(_LARGE_NUMEL)}
    save(tmp_path / "a", "t", large)
    save(tmp_path / "b", "t", large)
    save(tmp_path / "small", "t")
    arguments = [str(tmp_path / name) for name in ("a", "b", "small")]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    statuses, _, grown_nbytes = done.stdout.splitlines()[-1].rpartition(" ")
    assert statuses == "[0, 0, 0, 0]"
    assert int(grown_nbytes) < _LARGE_NUMEL * 4  # less than one of the two tensors
