from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.common.timing import NullTimers, ThroughputTimer, Timers
from deepspeed.errors import ArgumentError, UsageError


class Clock:
    """Shows the time that the test sets; `ticks` counts synchronisations before readings."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.synchronized_at: list[float] = []

    def __call__(self) -> float:
        return self.seconds

    def synchronize(self) -> None:
        self.synchronized_at.append(self.seconds)


@dataclass
class Config:
    enabled: bool = True
    synchronized: bool = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timers(clock: Clock) -> Timers:
    return Timers(clock.synchronize, clock_seconds=clock, memory_text=lambda: "memory: 3 B")


def _run(timers: Timers, clock: Clock, name: str, seconds: float, **how: bool) -> None:
    timers(name).start()
    clock.seconds += seconds
    timers(name).stop(**how)


def test_elapsed_is_the_sum_of_the_intervals_in_milliseconds(timers: Timers, clock: Clock) -> None:
    _run(timers, clock, "forward", 0.5)
    clock.seconds += 9
    _run(timers, clock, "forward", 0.25)
    assert timers("forward").elapsed(reset=False) == pytest.approx(750)
    assert timers("forward").elapsed() == pytest.approx(750)
    assert timers("forward").elapsed() == 0


def test_a_running_interval_counts_and_goes_on_after_a_reset(timers: Timers, clock: Clock) -> None:
    timers("step").start()
    clock.seconds += 1
    assert timers("step").elapsed() == pytest.approx(1000)
    assert timers("step").started
    clock.seconds += 2
    timers("step").stop()
    assert timers("step").elapsed() == pytest.approx(2000)


def test_stop_with_reset_holds_the_last_interval_alone(timers: Timers, clock: Clock) -> None:
    _run(timers, clock, "a", 5)
    _run(timers, clock, "a", 1, reset=True)
    assert timers("a").elapsed() == pytest.approx(1000)


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=10))
def test_mean_is_over_recorded_intervals_only(seconds: list[float]) -> None:
    clock = Clock()
    timers = Timers(clock_seconds=clock)
    _run(timers, clock, "a", 50)
    for each in seconds:
        _run(timers, clock, "a", each, record=True)
    assert timers.get_mean(["a", "never used"], normalizer=2) == {"a": pytest.approx(sum(seconds) / len(seconds) * 500)}
    assert timers.get_mean(["a"]) == {"a": 0.0}


def test_the_device_is_waited_for_before_each_reading(timers: Timers, clock: Clock) -> None:
    _run(timers, clock, "a", 1)
    assert clock.synchronized_at == [100.0, 101.0]


@pytest.mark.parametrize(("first", "second"), [("start", "start"), ("reset", "stop")])
def test_calls_out_of_order_say_what_to_do(timers: Timers, first: str, second: str) -> None:
    getattr(timers("a"), first)()
    with pytest.raises(UsageError, match=rf"timer 'a': {second}\(\) while it .* call \w+\(\) first"):
        getattr(timers("a"), second)()


def test_the_log_line_has_the_known_names_in_the_order_asked(
    timers: Timers, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    _run(timers, clock, "bwd", 0.002)
    _run(timers, clock, "fwd", 0.001)
    timers.log(["fwd", "unused", "bwd"], normalizer=2, memory_breakdown=True)
    assert caplog.messages == ["time (ms) | fwd: 0.50 | bwd: 1.00 | memory: 3 B"]
    assert timers("fwd").elapsed() == 0
    assert not timers.has_timer("unused")
    assert list(timers.get_timers()) == ["bwd", "fwd"]


def test_a_normalizer_that_cannot_divide_is_refused(timers: Timers) -> None:
    for call in (timers.log, timers.get_mean):
        with pytest.raises(ArgumentError, match=r"normalizer=0 .* must be positive"):
            call([], normalizer=0)


def test_null_timers_accept_every_call_and_show_zero(caplog: pytest.LogCaptureFixture) -> None:
    timers = NullTimers()
    timer = timers("any")
    timer.stop()
    timer.start()
    timer.start()
    timer.reset()
    timers.log(["any"])
    assert (timer.elapsed(), timer.mean(), timer.started) == (0.0, 0.0, False)
    assert (timers.has_timer("any"), timers.get_timers(), timers.get_mean(["any"])) == (False, {}, {})
    assert caplog.messages == []


def _throughput(clock: Clock, lines: list[str], **config: bool) -> ThroughputTimer:
    return ThroughputTimer(
        Config(**config),
        batch_size=8,
        start_step=1,
        steps_per_output=2,
        monitor_memory=True,
        logging_fn=lines.append,
        synchronize=clock.synchronize,
        clock_seconds=clock,
        memory_text=lambda: "memory: 3 B",
    )


def _micro_step(timer: ThroughputTimer, clock: Clock, seconds: float, is_boundary: bool) -> None:
    timer.start()
    clock.seconds += seconds
    timer.stop(global_step=is_boundary)
    clock.seconds += 1000  # between steps: not counted


def test_samples_per_second_leave_out_warm_up_and_time_between_steps(clock: Clock) -> None:
    lines: list[str] = []
    timer = _throughput(clock, lines)
    for seconds in (100.0, 1.0, 3.0):
        _micro_step(timer, clock, seconds / 2, is_boundary=False)
        _micro_step(timer, clock, seconds / 2, is_boundary=True)
    assert timer.avg_samples_per_sec() == pytest.approx(2 * 8 / 4)
    assert (timer.global_step_count, timer.micro_step_count) == (3, 6)
    assert lines == [
        "epoch=0 micro_step=4 global_step=2 RunningAvgSamplesPerSec=8.00 CurrSamplesPerSec=8.00 memory: 3 B",
    ]


def test_the_device_is_waited_for_once_per_global_step(clock: Clock) -> None:
    timer = _throughput(clock, [])
    _micro_step(timer, clock, 1, is_boundary=False)
    assert clock.synchronized_at == []
    _micro_step(timer, clock, 1, is_boundary=True)
    assert len(clock.synchronized_at) == 1


def test_an_unsynchronized_timer_never_waits_and_a_disabled_one_never_counts(clock: Clock) -> None:
    for config in ({"synchronized": False}, {"enabled": False}):
        timer = _throughput(clock, [], **config)
        for _ in range(3):
            _micro_step(timer, clock, 1, is_boundary=True)
        assert clock.synchronized_at == []
        assert timer.global_step_count == (0 if config == {"enabled": False} else 3)
    assert timer.avg_samples_per_sec() == 0.0


def test_a_stop_without_a_start_counts_nothing_and_a_new_epoch_counts_micro_steps_anew(clock: Clock) -> None:
    timer = _throughput(clock, [])
    timer.stop(global_step=True)
    assert timer.global_step_count == 0
    _micro_step(timer, clock, 1, is_boundary=True)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 0, 1)


def test_a_step_not_to_be_reported_is_still_counted(clock: Clock) -> None:
    lines: list[str] = []
    timer = _throughput(clock, lines)
    for _ in range(2):
        timer.start()
        clock.seconds += 1
        timer.stop(global_step=True, report_speed=False)
    assert lines == []
    assert timer.avg_samples_per_sec() == pytest.approx(8)


def test_an_interval_that_an_exception_cut_short_does_not_count() -> None:
    clock = Clock()
    timer = Timers(clock.synchronize, clock_seconds=clock)("step")

    def cut_short() -> None:
        with timer:
            clock.seconds += 5
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cut_short()
    assert not timer.started
    with timer:
        clock.seconds += 2
    assert timer.elapsed() == pytest.approx(2000)
