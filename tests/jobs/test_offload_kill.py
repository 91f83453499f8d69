"""A job that is killed with state on a disk: its files stay, trouble nobody, and the next job removes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_JOB = """
import sys
import torch
import deepspeed

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
tier = {"device": "nvme", "nvme_path": sys.argv[1], "pipeline_read": True, "pipeline_write": True}
zero = {"stage": int(sys.argv[2]), "offload_optimizer": tier, "sub_group_size": 512}
config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
engine = deepspeed.initialize(model=model, config=config)[0]
for step in range(1000 if sys.argv[3] == "forever" else 2):
    loss = engine(torch.ones(2, 64)).mean()
    engine.backward(loss)
    engine.step()
    if step == 1:
        print("trained", flush=True)
        if sys.argv[3] == "forever":
            sys.stdin.read()
"""


def _start(folder: Path, stage: int, how_long: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _JOB, str(folder), str(stage), how_long],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _wait_until_trained(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "trained" in line:
            return
    raise AssertionError(f"the job ended early, with status {process.wait(10)}")


def _folders(parent: Path) -> set[Path]:
    return {path for path in parent.iterdir() if any(path.iterdir())}


def test_files_of_a_killed_job_are_removed_by_the_next_one_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    killed, living = _start(tmp_path, 3, "forever"), _start(tmp_path, 1, "forever")
    try:
        _wait_until_trained(killed)
        _wait_until_trained(living)
        assert len(_folders(tmp_path)) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
        assert len(_folders(tmp_path)) == 2  # nobody was left to remove them
        following = _start(tmp_path, 2, "shortly")
        _wait_until_trained(following)
        assert following.wait(60) == 0
        (left,) = _folders(tmp_path)
        assert f"-{living.pid}-" in left.name
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()
    assert _start(tmp_path, 2, "shortly").wait(60) == 0
    assert list(tmp_path.iterdir()) == []  # the last one has removed its own as well
