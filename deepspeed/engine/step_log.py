"""What one engine writes into the run log, and when.

    start        build            every rank that writes
    step_ended   every update     the timers of the step are added up; nothing is written
    step         reported steps   `step` on rank 0, `rank_step` on every rank that writes: memory, phases, collectives, waits
    others       as they happen   checkpoints, experts, a profile, a pipeline's schedule
    end          destroy, or the end of the process

Values come from `engine.report`, which has read them already: nothing here waits for the device or for other ranks. A rank
that writes no file has a `NullStepLog`.

Lives here: sums between two records. Does not live here: which steps are reported (`report.Cadence`), the file (`run_log`).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from deepspeed.comm.meter import METER, Meter, OpSums
from deepspeed.common.timing import NullTimers, Timers
from deepspeed.run_log import (
    Checkpoint,
    CommSums,
    End,
    Experts,
    Profile,
    ProfileRow,
    RankStep,
    RunLogWriter,
    Schedule,
    Start,
    Step,
    engine_folder,
    free_engine,
)

if TYPE_CHECKING:
    from deepspeed.config.monitor import RunLogConfig
    from deepspeed.engine.step_summary import StepSummary

__all__ = ["Memory", "NullStepLog", "StepLog", "StepLogger", "next_engine", "open_writer"]

_MS_PER_SECOND = 1000.0
_MOST_CHARACTERS = 2000
_INNER, _ALLREDUCE, _BACKWARD = "backward_inner", "backward_allreduce", "backward"
_PHASES = {"forward": "forward", _INNER: "backward", _ALLREDUCE: "backward_reduce", "step": "step"}
"""Timer -> phase. `backward` as a whole counts only where its two parts are not timed."""


class Memory(NamedTuple):
    """Bytes that this process has now; of the device None where it is the host."""

    host_nbytes: int
    device_nbytes: int | None
    device_peak_nbytes: int | None


class StepLogger(Protocol):
    """What an engine tells its log."""

    @property
    def is_on(self) -> bool:
        """Whether anything is written."""

    def start(self, record: Start) -> None:
        """The engine is there."""

    def step_ended(self, step: int, timers: Timers | NullTimers) -> None:
        """An update is over; `timers` hold the time of this step."""

    def step(self, summary: StepSummary, more: Mapping[str, float]) -> None:
        """Report the step that ended last."""

    def note(self, name: str, value: float) -> None:
        """A value to be shown with the next reported step."""

    def experts(self, step: int, layers: Mapping[str, Sequence[float]]) -> None:
        """Tokens of each expert, by MoE layer."""

    def checkpoint(
        self, action: Literal["save", "load"], tag: str, step: int, began: float, nbytes: int | None, *, is_async: bool
    ) -> None:
        """A save or a load that began at `began` (`time.monotonic`) lets training go on now."""

    def profile(self, step: int, tree: Sequence[ProfileRow], all_flops: int, model_flops: int, peak: float | None) -> None:
        """A step was profiled: operations of all ranks in it, those without recomputation, and each device's peak."""

    def schedule(self, record: Schedule) -> None:
        """A batch of a pipeline was drawn."""

    def end(self) -> None:
        """The engine is done."""


class NullStepLog:
    """Writes nothing, and keeps nothing."""

    is_on = False

    def start(self, record: Start) -> None:
        """Do nothing."""

    def step_ended(self, step: int, timers: Timers | NullTimers) -> None:
        """Do nothing."""

    def step(self, summary: StepSummary, more: Mapping[str, float]) -> None:
        """Do nothing."""

    def note(self, name: str, value: float) -> None:
        """Do nothing."""

    def experts(self, step: int, layers: Mapping[str, Sequence[float]]) -> None:
        """Do nothing."""

    def checkpoint(
        self, action: Literal["save", "load"], tag: str, step: int, began: float, nbytes: int | None, *, is_async: bool
    ) -> None:
        """Do nothing."""

    def profile(self, step: int, tree: Sequence[ProfileRow], all_flops: int, model_flops: int, peak: float | None) -> None:
        """Do nothing."""

    def schedule(self, record: Schedule) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


def open_writer(block: RunLogConfig, rank: int, engine: int) -> RunLogWriter:
    """The file of this rank for the `engine`-th engine that trains now (from 1).

    Raises:
        ArgumentError: it cannot be opened.
    """
    return RunLogWriter(engine_folder(_folder(block), engine), rank)


def next_engine(block: RunLogConfig, rank: int) -> int:
    """The number of an engine that is made now: the least that no engine of this process has."""
    return free_engine(_folder(block), rank)


def _folder(block: RunLogConfig) -> Path:
    return Path(block.output_path, block.job_name)


class _Window:
    """What is added up from one record to the next."""

    def __init__(self, meter: Meter) -> None:
        self.steps = 0
        self.milliseconds: dict[str, float] = {}
        self._meter = meter
        self._ops, self._waited_seconds = meter.ops(), meter.waited_seconds

    def add(self, timers: Timers | NullTimers) -> None:
        self.steps += 1
        for name, timer in timers.get_timers().items():
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + timer.elapsed(reset=False)

    def phases(self) -> dict[str, float]:
        """Seconds per step."""
        timed, divisor = dict(self.milliseconds), self.steps * _MS_PER_SECOND
        whole = timed.pop(_BACKWARD, None)
        if whole is not None and _INNER not in timed:
            timed[_INNER] = whole
        return {phase: timed[name] / divisor for name, phase in _PHASES.items() if name in timed}

    def comm(self) -> dict[str, CommSums]:
        sums = {}
        for name, (calls, nbytes, seconds) in self._meter.ops().items():
            before = self._ops.get(name, OpSums())
            if calls > before.calls:
                sums[name] = CommSums(calls - before.calls, nbytes - before.nbytes, seconds - before.seconds)
        return sums

    def waited_seconds(self) -> float:
        return self._meter.waited_seconds - self._waited_seconds


class _Progress:
    """What the last record needs to know, apart from the log, which may be gone by then."""

    step = 0


class StepLog:
    """Writes one engine's records.

    Args:
        writer: of this rank's file.
        is_first: this is rank 0, which writes what holds for the whole run.
        batch_size: samples per global step.
        world_size: devices that work on a step.
        memory: what is in use now.
        meter: sums over the collectives of this process; switched on from here to `end`.
        clock_seconds: a monotonic clock.
    """

    is_on = True

    def __init__(
        self,
        writer: RunLogWriter,
        *,
        is_first: bool,
        batch_size: int,
        world_size: int,
        memory: Callable[[], Memory],
        meter: Meter = METER,
        clock_seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._writer = writer
        self._is_first = is_first
        self._batch_size = batch_size
        self._world_size = world_size
        self._memory = memory
        self._meter = meter
        self._clock_seconds = clock_seconds
        self._progress = _Progress()
        self._since_seconds: float | None = None
        self._timed_steps = 0
        self._noted: dict[str, float] = {}
        self._flops: tuple[int, int, float | None] | None = None
        meter.begin()
        self._window = _Window(meter)
        self._finish = weakref.finalize(self, _finish, writer, meter, self._progress)  # also when the interpreter ends

    def start(self, record: Start) -> None:
        """See `StepLogger`."""
        self._progress.step = record.step or 0
        self._writer.write(record)
        self._window = _Window(self._meter)  # what building the engine sent is no step's

    def step_ended(self, step: int, timers: Timers | NullTimers) -> None:
        """See `StepLogger`. The clock starts at the end of the first step: what came before it is no step's time."""
        self._progress.step = step
        self._window.add(timers)
        if self._since_seconds is None:
            self._since_seconds = self._clock_seconds()
        else:
            self._timed_steps += 1

    def step(self, summary: StepSummary, more: Mapping[str, float]) -> None:
        """See `StepLogger`."""
        seconds, window = self._seconds_per_step(), self._window
        phases, calls, waited_seconds = window.phases(), window.comm(), window.waited_seconds()
        of_rank = RankStep(summary.global_step, *self._memory(), phases, calls, waited_seconds)
        of_run = [self._of_run(summary, seconds, {**more, **self._noted})] if self._is_first else []
        self._writer.write(*of_run, of_rank)
        self._noted.clear()
        self._window = _Window(self._meter)

    def _seconds_per_step(self) -> float | None:
        assert self._since_seconds is not None  # step_ended came first
        now = self._clock_seconds()
        elapsed, steps = now - self._since_seconds, self._timed_steps
        self._since_seconds, self._timed_steps = now, 0
        return elapsed / steps if steps else None

    def _of_run(self, summary: StepSummary, seconds: float | None, more: Mapping[str, float]) -> Step:
        flops_per_second = mfu = None
        if seconds and self._flops is not None:
            all_flops, model_flops, peak = self._flops
            flops_per_second = all_flops / seconds
            mfu = None if peak is None else model_flops / seconds / peak / self._world_size
        return Step(
            step=summary.global_step,
            samples=summary.global_samples,
            loss=summary.loss,
            lr=[float(lr) for lr in summary.lr],
            grad_norm=summary.grad_norm,
            loss_scale=summary.loss_scale,
            skipped=summary.skipped_steps,
            seconds=seconds,
            samples_per_second=self._batch_size / seconds if seconds else None,
            flops_per_second=flops_per_second,
            mfu=mfu,
            more=more,
        )

    def note(self, name: str, value: float) -> None:
        """See `StepLogger`."""
        self._noted[name] = value

    def experts(self, step: int, layers: Mapping[str, Sequence[float]]) -> None:
        """See `StepLogger`."""
        if self._is_first and layers:
            shares = {name: [count / max(1.0, sum(counts)) for count in counts] for name, counts in layers.items()}
            self._writer.write(Experts(step, shares))

    def checkpoint(
        self, action: Literal["save", "load"], tag: str, step: int, began: float, nbytes: int | None, *, is_async: bool
    ) -> None:
        """See `StepLogger`."""
        self._writer.write(Checkpoint(action, tag, step, time.monotonic() - began, nbytes, is_async))

    def profile(self, step: int, tree: Sequence[ProfileRow], all_flops: int, model_flops: int, peak: float | None) -> None:
        """See `StepLogger`."""
        self._flops = (all_flops, model_flops, peak)
        if self._is_first:
            self._writer.write(Profile(step, tree))

    def schedule(self, record: Schedule) -> None:
        """See `StepLogger`."""
        if self._is_first:
            self._writer.write(record)

    def end(self) -> None:
        """See `StepLogger`. A second call does nothing."""
        self._finish()


def _finish(writer: RunLogWriter, meter: Meter, progress: _Progress) -> None:
    meter.end()
    writer.write(End(progress.step, _cause()))
    writer.close()


def _cause() -> str:
    """`done`, or the error that is on its way through the caller or has ended the script."""
    at_prompt = hasattr(sys, "ps1")  # there an error ends nothing
    error = sys.exc_info()[1] or (None if at_prompt else getattr(sys, "last_value", None))
    is_good = error is None or isinstance(error, StopIteration) or (isinstance(error, SystemExit) and not error.code)
    return "done" if is_good else f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
