"""`deepspeed --profile-steps` on a whole script: a trace per rank."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.launching import run_job

SCRIPT = """
import argparse, torch, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.parse_args()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine = deepspeed.initialize(model=model, config=config)[0]
for _ in range(4):
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
"""


def test_each_rank_leaves_a_trace_with_our_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--num_gpus", "2", "--profile-steps", "2-3", "--profile-folder", "traces", "train.py"]
    status, output = run_job(tmp_path, words)
    assert status == 0, output
    assert "traces of steps 2 to 3, one file per rank" in output
    files = sorted((tmp_path / "traces").iterdir())
    assert [file.name for file in files] == ["rank-00000.trace.json", "rank-00001.trace.json"]
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert [names.count(name) for name in ("forward", "backward", "step")] == [2, 2, 2]
        assert any(name.startswith("gather ") for name in names)
        assert any(name.startswith("reduce ") for name in names)


def test_a_script_that_ends_before_the_first_step_is_over_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--num_gpus", "1", "--profile-steps", "5-7", "--profile-folder", "traces", "train.py"]
    status, output = run_job(tmp_path, words)
    assert status == 0, output
    assert "the script ended before step 5 was over: the trace holds what there was of it" in output
    assert "traces of steps 5 to 5, one file per rank" in output
