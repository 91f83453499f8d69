"""What docs/guide/activation-checkpointing.md shows is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_example_trains_on_two_ranks_and_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs/guide/activation-checkpointing.md").read_text(), re.DOTALL
    )
    script = tmp_path / "train.py"
    script.write_text(example + 'print(f"loss {loss.item():.3f} after {engine.global_steps} steps")\n')
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", str(script)]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"loss \d+\.\d+ after 20 steps", done.stdout)) == 2
    assert not list((tmp_path / "nvme").iterdir())
