"""What README.md shows is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def _example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_readme_example_trains_and_saves(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(_example() + 'print(f"loss {loss.item():.3f} after {engine.global_steps} steps")\n')
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(script)]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = 10 * 256 // (8 * ranks) // 2
    losses = [float(loss) for loss in re.findall(rf"loss (\d+\.\d+) after {steps} steps", done.stdout)]
    assert len(losses) == ranks
    assert max(losses) < 2.0  # the targets' variance is 16
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"global_step{steps}"
