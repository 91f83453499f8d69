from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from deepspeed.checkpoint.save.scripts import SCRIPTS, place_scripts
from tests.unit.checkpoint.export_checkpoints import save_net


def test_the_scripts_are_executable_and_call_the_installed_library(tmp_path: Path) -> None:
    expected = save_net(tmp_path)
    place_scripts(tmp_path)
    paths = [tmp_path / f"{name}.py" for name in SCRIPTS]
    assert all(os.access(path, os.X_OK) for path in paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "t", "zero_to_fp32.py", "zero_to_torch.py"]
    subprocess.run([sys.executable, "zero_to_fp32.py", ".", "out"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    got = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_scripts_that_are_there_are_left_alone_and_others_replaced(tmp_path: Path) -> None:
    place_scripts(tmp_path)
    first, second = (tmp_path / f"{name}.py" for name in SCRIPTS)
    text = second.read_bytes()
    second.write_text("of an older version")
    kept = first.stat().st_ino
    place_scripts(tmp_path)
    assert first.stat().st_ino == kept
    assert second.read_bytes() == text
