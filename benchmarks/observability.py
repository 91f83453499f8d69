"""What does watching a run cost: with all of it off, and with all of it on?

Goals: off at most 0.5 % over an engine without a report, on at most 3 % over off.

Each of two ranks has three engines of one GPT (width 256, 4 layers, vocabulary 2048, 2 rows of 128 positions, ZeRO stage 2,
a step of some 0.2 s) in one process:

    bare   the report object is replaced by one that does nothing: no timers, no throughput, no loss kept
    off    as configured by default
    on     run_log at every step, comms_logger, wall_clock_breakdown, csv_monitor

They take turns step by step, and each round begins with another (bare off on, off on bare, on bare off), so that none
follows itself, with its weights still in the caches. A figure is the median of the ratios of all rounds, on the worse rank.
What belongs to the process and not to an engine (the communications log, the meter of collectives) is on during the steps of
`on` alone.
`..._cpu` are the same ratios in processor time, which feels less of what else the machine does. Losses of the three engines
must be equal in every bit.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from benchmarks.harness.cases import OURS, Case, Goal, Measured
from benchmarks.harness.models import build_model, make_batches
from benchmarks.harness.trainers import Training, engine_config, join, rank

_BARE, _OFF, _ON = "bare", "off", "on"

CASES = (
    Case(
        "observability",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS,),
        figures=("off_of_bare", "on_of_off", "off_of_bare_cpu", "on_of_off_cpu", "step_ms"),
        of=OURS,
        ranks=2,
        goals=(Goal("off_of_bare", 1.005), Goal("on_of_off", 1.03)),
        pairs=3,
        arguments={
            "model": {"width": 256, "layers": 4, "vocabulary": 2048},
            "stage": 2,
            "warm": 4,
            "rounds": 60,
        },
    ),
)


class _NoReport:
    """In the place of `engine.report.StepReport`: answers what an engine asks, and does nothing."""

    def __init__(self, report: Any) -> None:
        from deepspeed.common.timing import NullTimers

        self.timers, self.log, self.monitor, self.cadence = NullTimers(), report.log, report.monitor, report.cadence
        self.throughput = SimpleNamespace(start=lambda: None, stop=lambda **_: None)

    def add_loss(self, loss: Tensor, multiplier: float) -> None:
        """Keep nothing."""

    def is_due(self, global_step: int) -> bool:
        return False

    def mark(self, label: str) -> None:
        """Mark nothing."""

    step_ended = log_timers = mark

    def close_window(self) -> None:
        """Forget nothing."""


def _engine(name: str, arguments: Mapping[str, Any], training: Training, folder: str) -> Any:
    import deepspeed

    blocks: dict[str, Any] = {}
    if name == _ON:
        place = {"enabled": True, "output_path": folder}
        blocks = {"run_log": place, "csv_monitor": place, "wall_clock_breakdown": True, "log_level": "error"}
    model = build_model(arguments)
    config = {**engine_config(OURS, training), **blocks}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    if name == _BARE:
        engine._parts.report = _NoReport(engine._parts.report)
    return engine


def _watch_process(*, is_on: bool) -> None:
    from deepspeed.comm.meter import METER
    from deepspeed.comm.recorder import RECORDER

    METER.is_on = RECORDER.enabled = is_on


def _timed_step(engine: Any, batch: Tensor) -> tuple[float, float, float]:
    """(seconds, processor seconds, loss)."""
    began, began_cpu = time.perf_counter(), time.process_time()
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    return time.perf_counter() - began, time.process_time() - began_cpu, loss.item()


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    training = Training.of(arguments)
    batches = make_batches(build_model(arguments), training.rows, rank())
    join(contender)
    names = [_BARE, _OFF, _ON]
    wall: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: _engine(name, arguments, training, folder) for name in names}
        for number in range(arguments["warm"] + arguments["rounds"]):
            losses = []
            for name in (*names[number % 3 :], *names[: number % 3]):
                _watch_process(is_on=name == _ON)
                seconds, processor_seconds, loss = _timed_step(engines[name], batches[number % len(batches)])
                losses.append(loss)
                if number >= arguments["warm"]:
                    wall[name].append(seconds)
                    processor[name].append(processor_seconds)
            if len(set(losses)) != 1:
                raise RuntimeError(f"step {number}: the engines' losses differ: {losses}")
        _watch_process(is_on=False)
        for engine in engines.values():
            engine.destroy()
    return Measured(
        {
            "off_of_bare": _ratio(wall, _OFF, _BARE),
            "on_of_off": _ratio(wall, _ON, _OFF),
            "off_of_bare_cpu": _ratio(processor, _OFF, _BARE),
            "on_of_off_cpu": _ratio(processor, _ON, _OFF),
            "step_ms": statistics.median(wall[_OFF]) * 1e3,
        }
    )


def _ratio(seconds: Mapping[str, list[float]], one: str, other: str) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(seconds[one], seconds[other], strict=True))
