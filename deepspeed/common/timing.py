"""How long the parts of a step take, and samples per second.

Lives here: stopwatches over a clock. Does not live here: what a device needs before a clock may be read (`synchronize`
is handed in) and where a report goes besides the log. Built by `engine.report`; `NullTimers` stands in when
`wall_clock_breakdown` is off. Times that the documented interface returns are milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from deepspeed.common.logging import log_dist
from deepspeed.errors import ArgumentError, UsageError

__all__ = ["NullTimer", "NullTimers", "ThroughputConfig", "ThroughputTimer", "Timer", "Timers"]

_MS_PER_SECOND = 1000.0


def _nothing() -> None:
    """Synchronisation of a device that finishes each operation before the call returns."""


class Timer:
    """One named stopwatch. The time it holds is the sum of its start-stop intervals since the last reset.

    `with timer:` is one interval, which does not count when an exception leaves it.
    """

    def __init__(self, name: str, read_seconds: Callable[[], float]) -> None:
        self.name = name
        self._read_seconds = read_seconds
        self._began_seconds: float | None = None
        self._total_seconds = 0.0
        self._recorded_seconds: list[float] = []

    @property
    def started(self) -> bool:
        """Whether it is running now."""
        return self._began_seconds is not None

    def start(self) -> None:
        """Begin an interval. Raises UsageError when one is running."""
        if self._began_seconds is not None:
            raise UsageError(f"timer {self.name!r}: start() while it runs; call stop() first.")
        self._began_seconds = self._read_seconds()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the interval.

        Args:
            reset: hold this interval alone instead of adding it to the sum.
            record: also remember the interval for `mean`.

        Raises:
            UsageError: when it is not running.
        """
        if self._began_seconds is None:
            raise UsageError(f"timer {self.name!r}: stop() while it stands still; call start() first.")
        seconds = self._read_seconds() - self._began_seconds
        self._total_seconds = seconds if reset else self._total_seconds + seconds
        self._began_seconds = None
        if record:
            self._recorded_seconds.append(seconds)

    def abandon(self) -> None:
        """Forget a running interval: what it timed was cut short by an exception."""
        self._began_seconds = None

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.abandon()

    def elapsed(self, reset: bool = True) -> float:
        """Return the time held, a running interval included, in milliseconds; by default start again from zero."""
        total_seconds = self._total_seconds
        if self._began_seconds is not None:
            now_seconds = self._read_seconds()
            total_seconds += now_seconds - self._began_seconds
            if reset:
                self._began_seconds = now_seconds
        if reset:
            self._total_seconds = 0.0
        return total_seconds * _MS_PER_SECOND

    def mean(self) -> float:
        """Return the mean of the recorded intervals in milliseconds, 0.0 when there are none."""
        if not self._recorded_seconds:
            return 0.0
        return sum(self._recorded_seconds) / len(self._recorded_seconds) * _MS_PER_SECOND

    def reset(self) -> None:
        """Forget everything, a running interval and the recorded ones included."""
        self._began_seconds = None
        self._total_seconds = 0.0
        self._recorded_seconds.clear()


class Timers:
    """Stopwatches by name: `timers("forward").start()`."""

    def __init__(
        self,
        synchronize: Callable[[], None] = _nothing,
        *,
        clock_seconds: Callable[[], float] = time.perf_counter,
        memory_text: Callable[[], str] | None = None,
    ) -> None:
        """Build without any timer.

        Args:
            synchronize: waits until the device has done all it was asked to; called before each reading of the clock.
            clock_seconds: a monotonic clock.
            memory_text: describes memory in use now, for `log(memory_breakdown=True)`.
        """
        self._synchronize = synchronize
        self._clock_seconds = clock_seconds
        self._memory_text = memory_text
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Return the timer of that name, made at first use."""
        if name not in self._timers:
            self._timers[name] = Timer(name, self._read_seconds)
        return self._timers[name]

    def has_timer(self, name: str) -> bool:
        """Return whether a timer of that name was used."""
        return name in self._timers

    def get_timers(self) -> dict[str, Timer]:
        """Return the timers by name, in order of first use."""
        return dict(self._timers)

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log one line with the milliseconds of each timer; names that were never used are left out.

        Args:
            names: in the order of the line.
            normalizer: divides each time, for example the number of steps since the last line.
            reset: start the timers again from zero.
            memory_breakdown: append the text of `memory_text`.
            ranks: global ranks that log; None means rank 0.

        Raises:
            ArgumentError: when `normalizer` is not positive.
        """
        if normalizer <= 0:
            raise ArgumentError(f"normalizer={normalizer!r} divides the times and must be positive.")
        parts = [f"{n}: {self._timers[n].elapsed(reset) / normalizer:.2f}" for n in names if n in self._timers]
        if memory_breakdown and self._memory_text is not None:
            parts.append(self._memory_text())
        log_dist("time (ms) | " + " | ".join(parts), ranks=[0] if ranks is None else ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean of each timer's recorded intervals in milliseconds, divided by `normalizer`.

        Names that were never used are left out. With `reset`, the timers forget everything. Raises ArgumentError when
        `normalizer` is not positive.
        """
        if normalizer <= 0:
            raise ArgumentError(f"normalizer={normalizer!r} divides the times and must be positive.")
        used = [self._timers[name] for name in names if name in self._timers]
        means = {timer.name: timer.mean() / normalizer for timer in used}
        if reset:
            for timer in used:
                timer.reset()
        return means

    def _read_seconds(self) -> float:
        self._synchronize()
        return self._clock_seconds()


class NullTimer:
    """A stopwatch that reads no clock and always shows zero."""

    name = ""
    started = False

    def start(self) -> None:
        """Do nothing."""

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def elapsed(self, reset: bool = True) -> float:
        """Return 0.0."""
        return 0.0

    def mean(self) -> float:
        """Return 0.0."""
        return 0.0

    def reset(self) -> None:
        """Do nothing."""


class NullTimers:
    """Stands in for `Timers` when nothing is to be timed; a call costs an attribute look-up."""

    _timer = NullTimer()

    def __call__(self, name: str) -> NullTimer:
        """Return the one null timer."""
        return self._timer

    def has_timer(self, name: str) -> bool:
        """Return False."""
        return False

    def get_timers(self) -> dict[str, Timer]:
        """Return no timers."""
        return {}

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Do nothing."""

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return no means."""
        return {}


class ThroughputConfig(Protocol):
    """What `ThroughputTimer` reads of the config block `timers.throughput`."""

    @property
    def enabled(self) -> bool:
        """Whether anything is measured."""

    @property
    def synchronized(self) -> bool:
        """Whether the device is waited for before the clock is read at the end of a global step."""


class ThroughputTimer:
    """Samples per second over the global steps, from the first forward of a step to the end of its update.

    Time between `stop` and the next `start` (data loading, evaluation) is not counted. The device is waited for once per
    global step, at its end.
    """

    def __init__(
        self,
        config: ThroughputConfig,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
        *,
        synchronize: Callable[[], None] = _nothing,
        clock_seconds: Callable[[], float] = time.perf_counter,
        memory_text: Callable[[], str] | None = None,
    ) -> None:
        """Build a timer that has seen no step.

        Args:
            config: the block `timers.throughput`.
            batch_size: samples per global step over all ranks.
            start_step: global steps left out at the beginning, where caches and allocators warm up.
            steps_per_output: log a line every so many global steps; None for never.
            monitor_memory: append the text of `memory_text` to the line.
            logging_fn: takes the line; None means our logger on rank 0.
            synchronize: waits until the device is idle.
            clock_seconds: a monotonic clock.
            memory_text: describes memory in use now.
        """
        self.config = config
        self.batch_size = batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self._log = logging_fn if logging_fn is not None else log_dist
        self._synchronize = synchronize if config.synchronized else _nothing
        self._clock_seconds = clock_seconds
        self._memory_text = memory_text
        self._began_seconds: float | None = None
        self._step_seconds = 0.0
        self._counted_seconds = 0.0

    def update_epoch_count(self) -> None:
        """Say that the loader begins another epoch; micro-steps are counted from zero again."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-step. A second call before `stop` begins it anew."""
        if self.config.enabled:
            self._began_seconds = self._clock_seconds()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-step; without a `start` before it, do nothing.

        Args:
            global_step: this micro-step ended with an update, so a global step is complete.
            report_speed: log the line when it is due.
        """
        if self._began_seconds is None:
            return
        if global_step:
            self._synchronize()
        self._step_seconds += self._clock_seconds() - self._began_seconds
        self._began_seconds = None
        self.micro_step_count += 1
        if global_step:
            self._end_global_step(report_speed)

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over the counted steps, 0.0 before the first of them has ended."""
        counted_steps = self.global_step_count - self.start_step
        if counted_steps <= 0 or self._counted_seconds <= 0:
            return 0.0
        return counted_steps * self.batch_size / self._counted_seconds

    def _end_global_step(self, report_speed: bool) -> None:
        self.global_step_count += 1
        if self.global_step_count > self.start_step:
            self._counted_seconds += self._step_seconds
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._log(self._line())
        self._step_seconds = 0.0

    def _line(self) -> str:
        now = self.batch_size / self._step_seconds if self._step_seconds > 0 else 0.0
        line = (
            f"epoch={self.epoch_count} micro_step={self.micro_step_count} global_step={self.global_step_count} "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.2f} CurrSamplesPerSec={now:.2f}"
        )
        if self.monitor_memory and self._memory_text is not None:
            line += f" {self._memory_text()}"
        return line
