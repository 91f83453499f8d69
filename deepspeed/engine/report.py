"""What an engine tells about its steps: timers, throughput, log lines, monitor events, memory marks, the run log.

Reading values costs host synchronisations and a small collective, so it happens only on steps that report: every step when
a monitor is on, every `steps_per_print`-th or `run_log.every`-th otherwise, never when none of these is asked for.

Does not live here: stopwatches (`common.timing`), writers (`monitor`), the run log's records (`engine.step_log`). Built by
`engine.build`, called by the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.sums import all_reduce_now
from deepspeed.common.logging import log_dist
from deepspeed.common.texts import aligned
from deepspeed.common.timing import NullTimers, ThroughputTimer, Timers
from deepspeed.config.root import MONITORS
from deepspeed.engine.expert_report import ExpertReport
from deepspeed.engine.step_log import NullStepLog, StepLogger
from deepspeed.engine.step_summary import StepSummary

if TYPE_CHECKING:
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.monitor import MonitorMaster
    from deepspeed.topology.mesh import AxisGroup

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
BACKWARD_INNER, BACKWARD_ALLREDUCE = "backward_inner", "backward_allreduce"
_TIMER_NAMES = (FORWARD, BACKWARD, BACKWARD_INNER, BACKWARD_ALLREDUCE, STEP)
_PARTS = (BACKWARD_INNER, BACKWARD_ALLREDUCE)
"""Of backward."""


class Cadence(NamedTuple):
    """Which steps are reported: a question that all ranks must answer alike, because reporting is collective.

    Attributes:
        every: steps from one progress line to the next; 0: there are none.
        has_monitor: every step is reported.
        profiled_step: the global step that is profiled; -1: none is.
        logged: steps from one record of the run log to the next; 0: there is no run log.
    """

    every: int
    has_monitor: bool
    profiled_step: int = -1
    logged: int = 0

    @classmethod
    def of(cls, config: DeepSpeedConfig) -> Cadence:
        """What this rank's config asks for."""
        every = config.steps_per_print
        is_finite = every is not None and math.isfinite(every)
        profiler = config.flops_profiler
        return cls(
            int(every) if every is not None and is_finite else 0,
            any(getattr(config, name).enabled for name in MONITORS),
            profiler.profile_step if profiler.enabled else -1,
            config.run_log.every if config.run_log.enabled else 0,
        )

    def of_first(self, axis: AxisGroup, device: torch.device) -> Cadence:
        """The first rank's: its lines and events are those that are written. Collective over `axis`: one broadcast."""
        if axis.size == 1:
            return self
        told = torch.tensor(list(self), dtype=torch.int64, device=device)
        comm.broadcast(told, src=axis.ranks[0], group=axis.group)
        every, has_monitor, *others = told.tolist()
        return Cadence(every, bool(has_monitor), *others)

    def is_printed(self, global_step: int) -> bool:
        """Whether this global step has a progress line."""
        return bool(self.every) and global_step % self.every == 0

    def is_logged(self, global_step: int) -> bool:
        """Whether this global step goes into the run log."""
        return bool(self.logged) and global_step % self.logged == 0

    def is_due(self, global_step: int) -> bool:
        """Whether this global step is reported."""
        return self.has_monitor or self.is_printed(global_step) or self.is_logged(global_step)

    @property
    def reports(self) -> bool:
        """Whether any step is reported."""
        return self.has_monitor or self.every > 0 or self.logged > 0


class StepReport:
    """Collects during a step, speaks at its end. Every method is called by every data-parallel rank.

    Args:
        config: cadence and switches.
        monitor: takes events on the rank that has writers.
        axis: ranks over which the loss is averaged.
        batch_size: samples per global step.
        synchronize: waits for the device.
        mark_memory: logs memory in use under a label, where `memory_breakdown` asks for it.
        experts: the routers of the model, if it has any.
        cadence: which steps are reported, the same on all ranks; None: what `config` asks for.
        log: takes the records of the run log.
    """

    def __init__(
        self,
        config: DeepSpeedConfig,
        monitor: MonitorMaster,
        axis: AxisGroup,
        *,
        batch_size: int,
        synchronize: Callable[[], None],
        mark_memory: Callable[[str], None] | None = None,
        experts: ExpertReport | None = None,
        cadence: Cadence | None = None,
        log: StepLogger | None = None,
    ) -> None:
        self.monitor = monitor
        self.axis = axis
        self.log: StepLogger = log or NullStepLog()
        self.cadence = cadence or Cadence.of(config)
        self._shows_timers = config.wall_clock_breakdown
        self.timers: Timers | NullTimers = _timers(synchronize, is_shown=self._shows_timers, is_logged=log is not None)
        self.throughput = ThroughputTimer(
            config.timers.throughput, batch_size, steps_per_output=self.cadence.every or None, synchronize=synchronize
        )
        self._mark_memory = mark_memory if config.memory_breakdown else None
        self._experts = experts
        self._loss_sum: Tensor | None = None
        self._losses = 0
        self.more: dict[str, float] = {}
        """Other values of the step that ends, by name; reported beside its loss."""

    def mark(self, label: str) -> None:
        """Report memory under `label` when `memory_breakdown` is on."""
        if self._mark_memory is not None:
            self._mark_memory(label)

    def add_loss(self, loss: Tensor, multiplier: float) -> None:
        """Note one micro-batch's loss; `multiplier` undoes a division that the caller made for accumulation."""
        if self.cadence.reports:
            value = loss.detach().float() * multiplier
            self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
            self._losses += 1

    def is_due(self, global_step: int) -> bool:
        """Whether this global step is reported."""
        return self.cadence.is_due(global_step)

    def step_ended(self, global_step: int) -> None:
        """An update is over, reported or not."""
        self.log.step_ended(global_step, self.timers)

    def mean_loss(self) -> float | None:
        """Mean of the noted losses over micro-batches and ranks. Collective over the axis."""
        if self._loss_sum is None:
            return None
        total = torch.stack([self._loss_sum.double(), self._loss_sum.new_tensor(float(self._losses)).double()])
        if self.axis.size > 1:
            all_reduce_now(total, self.axis.group)
        loss, count = total.tolist()
        return float(loss / count)

    def step_done(self, summary: StepSummary) -> None:
        """Write one reported step. Collective over the axis where the model has experts."""
        of_experts = {} if self._experts is None else self._experts.values()
        if self.cadence.is_printed(summary.global_step):
            log_dist(_line(summary, self.more))
        if self.monitor.enabled:
            self.monitor.write_events(self._events(summary, of_experts))
        if self.cadence.is_logged(summary.global_step):
            self.log.step(summary, self.more)
            self.log.experts(summary.global_step, {} if self._experts is None else self._experts.tokens)

    def write_now(self, name: str, value: Tensor, global_samples: int) -> None:
        """Hand one value to the monitor, and to the run log's next step. It is read where a writer is."""
        if self.monitor.writers or self.log.is_on:
            self.monitor.write_events([(name, number := float(value), global_samples)])
            self.log.note(name.rpartition("/")[2], number)

    def close_window(self) -> None:
        """Forget the losses of the step that ended, reported or not."""
        self._loss_sum, self._losses, self.more = None, 0, {}

    def log_timers(self, global_step: int) -> None:
        """Log the step's timers where they are to be seen; they start again at zero."""
        if isinstance(self.timers, Timers):
            held = {name: timer.elapsed(reset=True) for name, timer in self.timers.get_timers().items()}
            if self._shows_timers and (not self.cadence.every or self.cadence.is_printed(global_step)):
                log_dist(time_table(global_step, {name: held[name] for name in _TIMER_NAMES if name in held}))

    def _events(self, s: StepSummary, of_experts: dict[str, float]) -> list[tuple[str, float, int]]:
        values: dict[str, float | None] = {
            "Train/Samples/train_loss": s.loss,
            **{f"Train/Samples/{name}": value for name, value in {**self.more, **of_experts}.items()},
            "Train/Samples/lr": s.lr[0] if s.lr else None,
            "Train/Samples/loss_scale": s.loss_scale,
            "Train/Samples/grad_norm": s.grad_norm,
        }
        if self._shows_timers:
            for name in _TIMER_NAMES:
                if self.timers.has_timer(name):
                    values[f"Train/Samples/elapsed_time_ms_{name}"] = self.timers(name).elapsed(reset=False)
        return [(name, value, s.global_samples) for name, value in values.items() if value is not None]


def _timers(synchronize: Callable[[], None], *, is_shown: bool, is_logged: bool) -> Timers | NullTimers:
    """For the run log alone the device is not waited for: on one that works behind the host, times are the host's."""
    if is_shown:
        return Timers(synchronize)
    return Timers() if is_logged else NullTimers()


def time_table(step: int, milliseconds: Mapping[str, float]) -> str:
    """The timers of a step as lines: milliseconds, and the share of the step's time. Parts stand below their whole."""
    whole = sum(each for name, each in milliseconds.items() if name not in _PARTS) or 1.0
    rows = [
        (f"{'  ' if name in _PARTS else ''}{name}", f"{each:.2f} ms", f"{each / whole:.1%}")
        for name, each in milliseconds.items()
    ]
    return "\n".join([f"time of step {step} on this rank", *aligned(rows, "lrr")])


def _line(s: StepSummary, more: dict[str, float]) -> str:
    parts = [f"step={s.global_step}", f"skipped={s.skipped_steps}", f"lr={s.lr}", f"mom={s.mom}"]
    if s.loss is not None:
        parts.append(f"loss={s.loss:.6g}")
    parts += [f"{name}={value:.6g}" for name, value in more.items()]
    if s.grad_norm is not None:
        parts.append(f"grad_norm={s.grad_norm:.4g}")
    if s.loss_scale is not None:
        parts.append(f"loss_scale={s.loss_scale:g}")
    return ", ".join(parts)
