"""What an engine writes into its run log: sums between two records, by a clock that is handed in."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.comm.meter import Meter
from deepspeed.common.timing import NullTimers, Timers
from deepspeed.engine.step_log import Memory, StepLog
from deepspeed.engine.step_summary import StepSummary
from deepspeed.run_log import RunLogWriter, file_name


@pytest.fixture(autouse=True)
def _no_error_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)  # pytest leaves that of a test that failed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _log(folder: Path, clock: Clock, *, is_first: bool = True, meter: Meter | None = None) -> StepLog:
    return StepLog(
        RunLogWriter(folder, 0),
        is_first=is_first,
        batch_size=8,
        world_size=2,
        memory=lambda: Memory(1000, None, None),
        meter=meter or Meter(),
        clock_seconds=clock,
    )


def _summary(step: int) -> StepSummary:
    return StepSummary(
        global_step=step,
        global_samples=8 * step,
        skipped_steps=0,
        lr=[0.5],
        mom=None,
        loss_scale=None,
        grad_norm=2.0,
        loss=1.5,
    )


def _records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / file_name(0)).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_seconds_are_those_of_one_step_and_the_first_step_of_a_run_has_none(tmp_path: Path) -> None:
    clock = Clock()
    log = _log(tmp_path, clock)
    for step in range(1, 8):
        clock.now += 50.0 if step == 1 else 2.0  # compiling, the first batch, ...: no step's time
        log.step_ended(step, NullTimers())
        if step in (1, 3, 7):
            log.step(_summary(step), {})
    steps = _records(tmp_path, "step")
    assert [(each["step"], each["seconds"], each["samples_per_second"]) for each in steps] == [
        (1, None, None),
        (3, 2.0, 4.0),
        (7, 2.0, 4.0),
    ]


def test_phases_are_means_over_the_steps_between_and_exclude_each_other(tmp_path: Path) -> None:
    clock = Clock()
    log, timers = _log(tmp_path, clock), Timers(clock_seconds=clock)
    for step in (1, 2):
        for name, seconds in (("forward", 1.0), ("backward", 3.0), ("step", 0.5)):
            timers(name).start()
            if name == "backward":
                timers("backward_inner").start()
                clock.now += 2.0
                timers("backward_inner").stop()
                timers("backward_allreduce").start()
                clock.now += seconds - 2.0
                timers("backward_allreduce").stop()
            else:
                clock.now += seconds * step
            timers(name).stop()
        log.step_ended(step, timers)
        for timer in timers.get_timers().values():
            timer.reset()
    log.step(_summary(2), {})
    (record,) = _records(tmp_path, "rank_step")
    assert record["phases"] == {"forward": 1.5, "backward": 2.0, "backward_reduce": 1.0, "step": 0.75}


def test_a_backward_that_is_not_timed_in_parts_counts_as_a_whole(tmp_path: Path) -> None:
    clock = Clock()
    log, timers = _log(tmp_path, clock), Timers(clock_seconds=clock)
    timers("backward").start()
    clock.now += 3.0
    timers("backward").stop()
    log.step_ended(1, timers)
    log.step(_summary(1), {})
    assert _records(tmp_path, "rank_step")[0]["phases"] == {"backward": 3.0}


def test_calls_and_waits_are_those_since_the_last_record(tmp_path: Path) -> None:
    meter = Meter()
    meter.add("all_reduce", 1000, 9.0)  # before this engine
    meter.waited(9.0)
    log = _log(tmp_path, Clock(), is_first=False, meter=meter)
    assert meter.is_on
    meter.add("all_reduce", 8, 0.5)
    meter.waited(0.25)
    log.step_ended(1, NullTimers())
    log.step(_summary(1), {})
    meter.add("broadcast", 4, 0.125)
    log.step_ended(2, NullTimers())
    log.step(_summary(2), {})
    first, second = _records(tmp_path, "rank_step")
    assert (first["comm"], first["waited_seconds"]) == ({"all_reduce": {"count": 1, "nbytes": 8, "seconds": 0.5}}, 0.25)
    assert (second["comm"], second["waited_seconds"]) == ({"broadcast": {"count": 1, "nbytes": 4, "seconds": 0.125}}, 0.0)
    assert (first["host_bytes"], first["device_bytes"]) == (1000, None)
    assert _records(tmp_path, "step") == []  # not the first rank
    log.end()
    assert not meter.is_on


def test_speed_in_operations_is_known_once_a_step_was_profiled(tmp_path: Path) -> None:
    clock = Clock()
    log = _log(tmp_path, clock)
    log.step_ended(1, NullTimers())
    log.profile(1, [], 4000, 3000, 500.0)
    clock.now += 2.0
    log.step_ended(2, NullTimers())
    log.step(_summary(2), {"aux": 0.5})
    (record,) = _records(tmp_path, "step")
    assert (record["flops_per_second"], record["mfu"]) == (2000.0, 1.5)  # 3000 / 2 s / 500 a device / 2 devices
    assert record["more"] == {"aux": 0.5}


def test_what_a_rank_tells_of_a_step_is_written_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(RunLogWriter, "write", lambda _, *records: calls.append([each.kind for each in records]))
    logs = [_log(tmp_path, Clock(), is_first=is_first) for is_first in (True, False)]
    for log in logs:
        log.step_ended(1, NullTimers())
        log.step(_summary(1), {})
    assert calls == [["step", "rank_step"], ["rank_step"]]


def test_noted_values_stand_with_the_next_step_alone(tmp_path: Path) -> None:
    log = _log(tmp_path, Clock())
    log.note("eval_loss", 0.25)
    for step in (1, 2):
        log.step_ended(step, NullTimers())
        log.step(_summary(step), {})
    assert [record["more"] for record in _records(tmp_path, "step")] == [{"eval_loss": 0.25}, {}]


def test_experts_have_shares_of_the_tokens(tmp_path: Path) -> None:
    log = _log(tmp_path, Clock())
    log.experts(1, {"block.0": [3.0, 1.0], "block.1": [0.0, 0.0]})
    log.experts(2, {})
    (record,) = _records(tmp_path, "experts")
    assert record["layers"] == {"block.0": [0.75, 0.25], "block.1": [0.0, 0.0]}


def test_the_end_says_done_or_what_is_on_its_way(tmp_path: Path) -> None:
    log = _log(tmp_path, Clock())
    log.step_ended(4, NullTimers())
    log.end()
    log.end()  # once
    failing = _log(tmp_path, Clock())
    try:
        raise ValueError("the loss is a string")
    except ValueError:
        failing.end()
    assert [(record["step"], record["cause"]) for record in _records(tmp_path, "end")] == [
        (4, "done"),
        (0, "ValueError: the loss is a string"),
    ]


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_is_an_end_by_its_status(tmp_path: Path, code: int) -> None:
    log = _log(tmp_path, Clock())
    try:
        raise SystemExit(code)
    except SystemExit:
        log.end()
    assert _records(tmp_path, "end")[0]["cause"] == ("SystemExit: 3" if code else "done")


def test_a_log_that_is_dropped_ends_too(tmp_path: Path) -> None:
    meter = Meter()
    log = _log(tmp_path, Clock(), meter=meter)
    log.step_ended(2, NullTimers())
    del log
    gc.collect()
    assert _records(tmp_path, "end")[0]["step"] == 2
    assert not meter.is_on
