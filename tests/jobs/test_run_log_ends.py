"""How a run log ends, by how the process ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import run_job

SCRIPT = """
import argparse, os, signal, sys, torch, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--how")
how = parser.parse_args().how
model = torch.nn.Linear(8, 3)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "run_log": {"enabled": True, "output_path": "runs", "job_name": "one"},
}
engine = deepspeed.initialize(model=model, config=config)[0]
for step in range(2):
    engine.backward(engine(torch.ones(4, 8)).square().mean())
    engine.step()
if how == "error":
    raise ValueError("the data has no end")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder: Path, how: str) -> list[dict[str, Any]]:
    (folder / "train.py").write_text(SCRIPT)
    status, output = run_job(folder, ["--num_gpus", "1", "train.py", "--how", how])
    assert (status == 0) == (how == "return"), output
    return [json.loads(line) for line in (folder / "runs" / "one" / "rank-00000.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("how", "cause"), [("return", "done"), ("error", "ValueError: the data has no end"), ("kill", None)]
)
def test_the_log_is_whole_and_ends_with_the_reason_where_there_is_time_for_one(
    tmp_path: Path, how: str, cause: str | None
) -> None:
    records = _run(tmp_path, how)
    kinds = ["start", "step", "rank_step", "step", "rank_step"]
    assert [record["kind"] for record in records] == kinds + (["end"] if cause else [])
    if cause:
        assert (records[-1]["step"], records[-1]["cause"]) == (2, cause)


def test_a_second_run_appends(tmp_path: Path) -> None:
    first = _run(tmp_path, "kill")
    assert _run(tmp_path, "return")[: len(first)] == first
    assert [record["kind"] for record in _run(tmp_path, "return")].count("start") == 3
