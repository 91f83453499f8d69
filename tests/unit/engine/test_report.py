"""What a step tells, when, and to whom."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest
import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.report import FORWARD, STEP, StepReport, time_table
from deepspeed.engine.step_summary import StepSummary
from deepspeed.topology.mesh import AxisGroup

SUMMARY = StepSummary(
    global_step=2, global_samples=8, skipped_steps=1, lr=[0.5], mom=[0.9], loss_scale=4.0, grad_norm=3.0, loss=1.25
)


class Monitor:
    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, event_list: Any) -> None:
        self.events += event_list


class NoMonitor(Monitor):
    def __init__(self) -> None:
        super().__init__(False)
        self.writers: tuple[Any, ...] = ()


class Log:
    is_on = True

    def __init__(self) -> None:
        self.told: list[str] = []

    def step_ended(self, step: int, timers: Any) -> None:
        self.told.append(f"step_ended {list(timers.get_timers())}")

    def step(self, summary: Any, more: Any) -> None:
        self.told.append(f"step {more}")

    def experts(self, step: int, layers: Any) -> None:
        self.told.append(f"experts {layers}")

    def note(self, name: str, value: float) -> None:
        self.told.append(f"{name} {value}")


def report(**keys: Any) -> tuple[StepReport, Monitor, list[str]]:
    config = DeepSpeedConfig({"train_batch_size": 4, **keys})
    monitor, marks = Monitor(config.csv_monitor.enabled), list[str]()
    made = StepReport(
        config,
        monitor,  # type: ignore[arg-type]
        AxisGroup([0], 0),
        batch_size=4,
        synchronize=lambda: None,
        mark_memory=marks.append,
    )
    return made, monitor, marks


@pytest.mark.parametrize(
    ("keys", "due"),
    [
        ({}, [False, False, False, False]),
        ({"steps_per_print": 2}, [False, True, False, True]),
        ({"steps_per_print": float("inf")}, [False, False, False, False]),
        ({"csv_monitor": {"enabled": True}}, [True, True, True, True]),
        ({"run_log": {"enabled": True, "every": 3}}, [False, False, True, False]),
        ({"run_log": {"enabled": False, "every": 3}}, [False, False, False, False]),
        ({"run_log": {"enabled": True, "every": 3}, "steps_per_print": 2}, [False, True, True, True]),
    ],
    ids=str,
)
def test_steps_are_due_by_cadence_and_every_step_with_a_monitor(keys: dict[str, Any], due: list[bool]) -> None:
    made, _, _ = report(**keys)
    assert [made.is_due(step) for step in range(1, 5)] == due


def test_the_loss_is_the_mean_of_the_windows_micro_batches() -> None:
    made, _, _ = report(steps_per_print=1)
    assert made.mean_loss() is None
    made.add_loss(torch.tensor(1.0), 1.0)
    made.add_loss(torch.tensor(0.75, dtype=torch.bfloat16), 4.0)  # divided by the caller: 3 in truth
    assert made.mean_loss() == 2.0
    made.close_window()
    assert made.mean_loss() is None


def test_losses_are_not_kept_when_nobody_asks_for_them() -> None:
    made, _, _ = report()
    made.add_loss(torch.tensor(1.0), 1.0)
    assert made.mean_loss() is None


def test_monitor_events_have_the_documented_names_over_samples() -> None:
    made, monitor, _ = report(csv_monitor={"enabled": True}, wall_clock_breakdown=True)
    for name in (FORWARD, STEP):
        made.timers(name).start()
        made.timers(name).stop()
    made.step_done(SUMMARY)
    values = {name: value for name, value, _ in monitor.events}
    assert {samples for _, _, samples in monitor.events} == {8}
    elapsed = [values.pop(f"Train/Samples/elapsed_time_ms_{name}") for name in (FORWARD, STEP)]
    assert all(ms >= 0 for ms in elapsed)
    assert values == {
        "Train/Samples/train_loss": 1.25,
        "Train/Samples/lr": 0.5,
        "Train/Samples/loss_scale": 4.0,
        "Train/Samples/grad_norm": 3.0,
    }


def test_what_is_not_known_is_not_written() -> None:
    made, monitor, _ = report(csv_monitor={"enabled": True})
    made.step_done(dataclasses.replace(SUMMARY, loss=None, loss_scale=None, grad_norm=None, lr=[]))
    assert monitor.events == []


def test_a_printed_step_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    made, monitor, _ = report(steps_per_print=2)
    with caplog.at_level(logging.INFO):
        made.step_done(SUMMARY)
        made.step_done(dataclasses.replace(SUMMARY, global_step=3))
    (line,) = caplog.messages
    assert line == "step=2, skipped=1, lr=[0.5], mom=[0.9], loss=1.25, grad_norm=3, loss_scale=4"
    assert monitor.events == []


def test_memory_is_marked_only_where_the_config_asks() -> None:
    for keys, wanted in (({}, []), ({"memory_breakdown": True}, ["before forward"])):
        made, _, marks = report(**keys)
        made.mark("before forward")
        assert marks == wanted


def test_timers_are_logged_at_the_printed_steps_and_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    made, _, _ = report(wall_clock_breakdown=True, steps_per_print=2)
    for step in (1, 2):
        made.timers(FORWARD).start()
        made.timers(FORWARD).stop()
        with caplog.at_level(logging.INFO):
            made.log_timers(step)
        assert made.timers(FORWARD).elapsed() == 0.0
    assert len(caplog.messages) == 1
    assert re.match(r"time of step 2 on this rank\nforward +\d+\.\d\d ms", caplog.messages[0])


def test_times_of_a_step_are_a_table_with_units_and_shares() -> None:
    held = {"forward": 250.0, "backward": 700.0, "backward_inner": 650.5, "backward_allreduce": 49.5, "step": 1050.0}
    assert time_table(12, held).splitlines() == [
        "time of step 12 on this rank",
        "forward                250.00 ms  12.5%",
        "backward               700.00 ms  35.0%",
        "  backward_inner       650.50 ms  32.5%",
        "  backward_allreduce    49.50 ms   2.5%",
        "step                  1050.00 ms  52.5%",
    ]
    assert time_table(1, {}) == "time of step 1 on this rank"


def test_a_run_log_times_steps_without_showing_them(caplog: pytest.LogCaptureFixture) -> None:
    config = DeepSpeedConfig({"train_batch_size": 4, "csv_monitor": {"enabled": True}, "run_log": {"enabled": True}})
    monitor, log = Monitor(True), Log()
    made = StepReport(
        config,
        monitor,  # type: ignore[arg-type]
        AxisGroup([0], 0),
        batch_size=4,
        synchronize=pytest.fail,  # the device is not waited for
        log=log,  # type: ignore[arg-type]
    )
    made.timers(FORWARD).start()
    made.timers(FORWARD).stop()
    with caplog.at_level(logging.INFO):
        made.step_ended(2)
        made.step_done(SUMMARY)
        made.log_timers(2)
    assert log.told == ["step_ended ['forward']", "step {}", "experts {}"]
    assert made.timers(FORWARD).elapsed() == 0.0
    assert caplog.messages == []
    assert not [name for name, _, _ in monitor.events if "elapsed" in name]


def test_values_for_the_monitor_are_noted_for_the_run_log() -> None:
    config = DeepSpeedConfig({"train_batch_size": 4, "run_log": {"enabled": True}})
    log = Log()
    made = StepReport(
        config,
        NoMonitor(),  # type: ignore[arg-type]
        AxisGroup([0], 0),
        batch_size=4,
        synchronize=lambda: None,
        log=log,  # type: ignore[arg-type]
    )
    made.write_now("Train/Samples/eval_loss", torch.tensor(0.5), 8)
    assert log.told == ["eval_loss 0.5"]
