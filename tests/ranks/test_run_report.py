"""The report of real runs: two ranks that were started twice, and a pipeline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed.run_report import facts, read_run
from deepspeed.run_report.page import render
from deepspeed.run_report.sections import sections
from deepspeed.run_report.summary import summarise
from tests.support.engines import config, make_engine, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}


def _block(folder: str) -> dict[str, Any]:
    return {"run_log": {"enabled": True, "output_path": folder, "job_name": "run"}}


def _train(rank: int, world_size: int, folder: str, steps: int, resumed: bool) -> float:
    """The mean loss of the last step; saves at step 2, or resumes there. Rank 1 is slow."""
    engine = make_engine(build(Mlp), config(1, **ADAM, **zero(2), **_block(folder)))
    if resumed:
        engine.load_checkpoint(f"{folder}/saved")
    loss = 0.0
    for number, step in enumerate(make_batches(engine.module, steps, 1, world_size)):
        for micro in step:
            value = engine(*micro[rank])
            if rank == 1:
                time.sleep(0.02)
            engine.backward(value)
            engine.step()
            loss = value.item()
        if number == 1 and not resumed:
            engine.save_checkpoint(f"{folder}/saved", tag="two")
    engine.destroy()
    return loss


def test_two_starts_of_a_real_run_make_one_report(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), 5, False)
    losses = run_ranks(_train, 2, str(tmp_path), 6, True)
    run = read_run(tmp_path / "run")
    assert (run.unread, run.unknown_kinds, run.cut_off) == ((), {}, ())
    assert [attempt.world_size for attempt in run.attempts] == [2, 2]
    told = facts.steps(run)
    assert told.kept.values("step").tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert told.redone.values("step").tolist() == [3, 4, 5]  # after the checkpoint of step 2
    summary = summarise(run)
    assert (summary.state, summary.model, summary.attempts) == ("done", "Mlp", 2)
    assert summary.loss == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert facts.waits(run).straggler == 1
    (reduced,) = [each for each in facts.operations(run) if each.name == "reduce_scatter_tensor"]
    assert reduced.count == 11  # one bucket in each of 5 and 6 steps
    assert reduced.seconds > 0
    assert [(each.action, each.tag, each.step) for each in facts.checkpoints(run)] == [
        ("save", "two", 2),
        ("load", "two", 2),
    ]
    shown, absent = sections(run)
    assert {each.title for each in shown} >= {
        "Training",
        "Speed",
        "Memory",
        "Where a step's time goes",
        "Communication",
        "Who waits for whom",
    }
    assert {each.title for each in absent} == {"Loss scale and skipped steps", "Pipeline schedule", "Expert load", "Modules"}
    assert len(render(run, time.time())) > 50_000
