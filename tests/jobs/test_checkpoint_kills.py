"""A save that is killed at any moment costs that save and nothing else. The long run: `benchmarks/checkpoint_kills.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import checkpoint_kills
from deepspeed.errors import CheckpointError
from tests.support.sweeps import IS_SWEEP

_ROOT = Path(__file__).resolve().parents[2]
_KILLS = 200 if IS_SWEEP else 12


def test_ranks_killed_at_random_moments_of_a_save_resume_from_a_whole_checkpoint(tmp_path: Path) -> None:
    """In memory, where there is a folder for that: a killed process leaves to the next what it wrote, flushed or not."""
    shared = Path("/dev/shm")
    is_in_memory = not IS_SWEEP and os.access(shared, os.W_OK)
    with tempfile.TemporaryDirectory(dir=shared if is_in_memory else tmp_path) as folder:
        script = Path("benchmarks", "checkpoint_kills.py")
        command = [sys.executable, str(script), "--kills", str(_KILLS), "--folder", folder]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60 + 10 * _KILLS, check=False)
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert (report["kills"], report["resumed"]) == (_KILLS, _KILLS)
    met = report["met"]
    assert met["over the same tag"] + met["under a new tag"] == _KILLS
    assert min(met["by the clock"], met["at a call"], met["the save in flight was lost"]) > 0
    assert done.returncode == 0


def _dangle(folder: Path) -> None:
    shutil.rmtree(folder / "same")


def _mix(folder: Path) -> None:
    checkpoint_kills.save(folder, 3, 0, 1)
    (folder / "same").rename(folder / "step4")


def _cut(folder: Path) -> None:
    shard = folder / "same" / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [_dangle, _mix, _cut])
def test_what_the_rounds_look_at_shows_a_loss(harm: object, tmp_path: Path) -> None:
    checkpoint_kills.save(tmp_path, 1, 0, 1)
    assert checkpoint_kills._check(tmp_path, 1, 2) == 1
    harm(tmp_path)  # type: ignore[operator]
    with pytest.raises((CheckpointError, ValueError)):
        checkpoint_kills._check(tmp_path, 1, 2)


def test_what_a_save_had_returned_for_must_be_there(tmp_path: Path) -> None:
    checkpoint_kills.save(tmp_path, 1, 0, 1)
    with pytest.raises(ValueError, match="a save had returned for 2"):
        checkpoint_kills._check(tmp_path, 2, 3)
