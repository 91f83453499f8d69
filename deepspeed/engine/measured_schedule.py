"""Draw one batch of a pipeline as it happened: every stage times its works, and the first rank writes them into the run log.

    the engine's second batch     each stage: forwards, backwards and weight gradients, start and end        [Note: clocks]
    its end                       the works of the stages of one pipeline come together --> `run_log.Schedule`
    afterwards                    everything is off the engine

The first batch is passed over: allocators, caches and shapes of messages are settled in it. So is a batch whose FLOPs are
counted. Until then a method of the one engine is replaced (`profiled_step`, [Note: methods replaced]).

[Note: clocks] Stages of one host read one clock. Those of several hosts are as far off as their hosts' clocks of the day.

Built by `engine.build` where the first rank has a run log. Does not live here: drawing (`pipe.drawing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepspeed import comm
from deepspeed.engine.pipeline_batch import BatchRun, StageCompute
from deepspeed.engine.replaced import ReplacedMethods
from deepspeed.pipe.drawing import text_lines
from deepspeed.pipe.orders import Work
from deepspeed.pipe.timeline import Span, Timeline
from deepspeed.run_log import Schedule
from deepspeed.topology.mesh import AxisGroup

if TYPE_CHECKING:
    from deepspeed.engine.pipeline import PipelineEngine

__all__ = ["MeasuredSchedule", "schedule_of"]

Spans = list[tuple[str, int, int, float, float]]
"""(kind, micro-batch, chunk, start, end) of each work of a stage."""


class MeasuredSchedule:
    """Of one engine, all of whose ranks have one.

    Args:
        engine: just made.
        synchronize: waits for the device.
        clock_seconds: the clock that all stages share.
    """

    def __init__(
        self, engine: PipelineEngine, synchronize: Callable[[], None], clock_seconds: Callable[[], float] = time.time
    ) -> None:
        self._engine = engine
        self._synchronize = synchronize
        self._clock_seconds = clock_seconds
        self._batches = 0
        self._spans: Spans = []
        self._methods = ReplacedMethods()

    def start(self) -> None:
        """Wait for the batch. [Note: methods replaced]"""
        self._methods.replace(self._engine, "_carry_out", self._carried_out)

    def _carried_out(self, method: Callable[..., None], run: BatchRun, schedule: str, count: int) -> None:
        if schedule == "inference" or not self._is_now():
            method(run, schedule, count)
            return
        self._spans.clear()  # of a batch that was cut short
        run.compute = _TimedCompute(run, self._synchronize, self._clock_seconds, self._spans)
        method(run, schedule, count)
        self._methods.restore()
        self._write(schedule, count)

    def _is_now(self) -> bool:
        self._batches += 1
        return self._batches > 1 and self._engine.global_steps != self._engine._parts.report.cadence.profiled_step

    def _write(self, schedule: str, count: int) -> None:
        """Collective over the stages."""
        of_stages = _gathered(self._spans, self._engine._parts.mesh.axis("pipe"))
        log = self._engine._parts.report.log
        if log.is_on:
            log.schedule(schedule_of(schedule, count, of_stages))


def _gathered(spans: Spans, axis: AxisGroup) -> list[Spans]:
    of_stages: list[Any] = [spans]
    if axis.size > 1:
        of_stages = [None] * axis.size
        comm.all_gather_object(of_stages, spans, group=axis.group)
    return of_stages


def schedule_of(name: str, micro_batches: int, of_stages: Sequence[Spans]) -> Schedule:
    """The record of one batch; its first work starts at 0."""
    zero = min(start for spans in of_stages for *_, start, _ in spans)
    timeline = Timeline(
        tuple(
            tuple(Span(Work(kind, number, chunk), start - zero, end - zero) for kind, number, chunk, start, end in spans)  # type: ignore[arg-type]
            for spans in of_stages
        )
    )
    return Schedule(
        name=name,
        stages=len(of_stages),
        micro_batches=micro_batches,
        text="\n".join(text_lines(timeline)),
        works=[
            (stage, start, end, work.kind, work.micro_batch)
            for stage, spans in enumerate(timeline.spans)
            for work, start, end in spans
        ],
        bubble=timeline.bubble,
    )


class _TimedCompute:
    """`StageCompute` of a run that notes when each work computes; waiting for messages is no part of it."""

    def __init__(
        self, run: BatchRun, synchronize: Callable[[], None], clock_seconds: Callable[[], float], spans: Spans
    ) -> None:
        self._compute: StageCompute = run.compute
        self._run = run
        self._synchronize = synchronize
        self._clock_seconds = clock_seconds
        self._spans = spans

    def forward(self, chunk: int, inputs: Any, number: int) -> Any:
        """See `StageCompute`."""
        return self._timed(lambda: self._compute.forward(chunk, inputs, number))

    def loss(self, outputs: Any, labels: Any) -> Tensor:
        """See `StageCompute`: a part of the last stage's forward."""
        loss = self._compute.loss(outputs, labels)
        self._synchronize()
        kind, number, chunk, start, _ = self._spans[-1]
        self._spans[-1] = (kind, number, chunk, start, self._clock_seconds())
        return loss

    def scaled(self, loss: Tensor) -> Tensor:
        """See `StageCompute`."""
        return self._compute.scaled(loss)

    def backward(self, autograd: Callable[[], None]) -> None:
        """See `StageCompute`."""
        self._timed(lambda: self._compute.backward(autograd))

    def _timed(self, compute: Callable[[], Any]) -> Any:
        self._synchronize()
        start = self._clock_seconds()
        result = compute()
        self._synchronize()
        work = self._run.work
        assert work is not None  # one is carried out
        self._spans.append((work.kind, work.micro_batch, work.chunk, start, self._clock_seconds()))
        return result
