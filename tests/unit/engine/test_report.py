"""What a step tells, when, and to whom."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.report import FORWARD, STEP, StepReport, StepSummary
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
    assert caplog.messages[0].startswith("time (ms) | forward: ")
