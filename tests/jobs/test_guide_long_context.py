"""What docs/guide/long-context.md shows is run as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def test_the_examples_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    examples = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/guide/long-context.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    script = tmp_path / "train.py"
    script.write_text("\n".join([*examples, 'print(f"after {engine.global_steps} steps", head.weight.grad.shape)']))
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after 5 steps torch.Size([100, 16])" in done.stdout
