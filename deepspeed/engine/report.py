"""What an engine tells about its steps: timers, throughput, log lines, monitor events, memory marks.

Reading values costs host synchronisations and a small collective, so it happens only on steps that report: every step when
a monitor is on, every `steps_per_print`-th otherwise, never when neither is asked for.

Does not live here: stopwatches (`common.timing`), writers (`monitor`). Built by `engine.build`, called by the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.common.logging import log_dist
from deepspeed.common.timing import NullTimers, ThroughputTimer, Timers
from deepspeed.engine.expert_report import ExpertReport

if TYPE_CHECKING:
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.monitor import MonitorMaster
    from deepspeed.topology.mesh import AxisGroup

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
BACKWARD_INNER, BACKWARD_ALLREDUCE = "backward_inner", "backward_allreduce"
_TIMER_NAMES = (FORWARD, BACKWARD, BACKWARD_INNER, BACKWARD_ALLREDUCE, STEP)


@dataclass(frozen=True)
class StepSummary:
    """One global step, as reported. `loss` is the mean over the step's micro-batches and ranks, None when not known."""

    global_step: int
    global_samples: int
    skipped_steps: int
    lr: list[float]
    mom: list[Any] | None
    loss_scale: float | None
    grad_norm: float | None
    loss: float | None


class Cadence(NamedTuple):
    """Which steps are reported: a question that all ranks must answer alike, because reporting is collective.

    Attributes:
        every: steps from one progress line to the next; 0: there are none.
        has_monitor: every step is reported.
        profiled_step: the global step that is profiled; -1: none is.
    """

    every: int
    has_monitor: bool
    profiled_step: int = -1

    @classmethod
    def of(cls, config: DeepSpeedConfig) -> Cadence:
        """What this rank's config asks for."""
        every = config.steps_per_print
        blocks = (config.tensorboard, config.wandb, config.csv_monitor, config.comet)
        is_finite = every is not None and math.isfinite(every)
        profiler = config.flops_profiler
        return cls(
            int(every) if every is not None and is_finite else 0,
            any(block.enabled for block in blocks),
            profiler.profile_step if profiler.enabled else -1,
        )

    def of_first(self, axis: AxisGroup, device: torch.device) -> Cadence:
        """The first rank's: its lines and events are those that are written. Collective over `axis`: one broadcast."""
        if axis.size == 1:
            return self
        told = torch.tensor(list(self), dtype=torch.int64, device=device)
        comm.broadcast(told, src=axis.ranks[0], group=axis.group)
        every, has_monitor, profiled_step = told.tolist()
        return Cadence(every, bool(has_monitor), profiled_step)


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
    ) -> None:
        self.monitor = monitor
        self.axis = axis
        self.timers: Timers | NullTimers = Timers(synchronize) if config.wall_clock_breakdown else NullTimers()
        every, self._has_monitor, self.profiled_step = cadence or Cadence.of(config)
        self._every = every or None
        self.throughput = ThroughputTimer(
            config.timers.throughput, batch_size, steps_per_output=self._every, synchronize=synchronize
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
        if self._has_monitor or self._every is not None:
            value = loss.detach().float() * multiplier
            self._loss_sum = value if self._loss_sum is None else self._loss_sum + value
            self._losses += 1

    def is_due(self, global_step: int) -> bool:
        """Whether this global step is reported."""
        return self._has_monitor or self._is_printed(global_step)

    def _is_printed(self, global_step: int) -> bool:
        return self._every is not None and global_step % self._every == 0

    def mean_loss(self) -> float | None:
        """Mean of the noted losses over micro-batches and ranks. Collective over the axis."""
        if self._loss_sum is None:
            return None
        total = torch.stack([self._loss_sum.double(), self._loss_sum.new_tensor(float(self._losses)).double()])
        if self.axis.size > 1:
            comm.all_reduce(total, group=self.axis.group)
        return float(total[0] / total[1])

    def step_done(self, summary: StepSummary) -> None:
        """Write one reported step. Collective over the axis where the model has experts."""
        of_experts = {} if self._experts is None else self._experts.values()
        if self._is_printed(summary.global_step):
            log_dist(_line(summary, self.more))
        if self.monitor.enabled:
            self.monitor.write_events(self._events(summary, of_experts))

    def write_now(self, name: str, value: Tensor, global_samples: int) -> None:
        """Hand one value to the monitor. It is read where a writer is."""
        if self.monitor.writers:
            self.monitor.write_events([(name, float(value), global_samples)])

    def close_window(self) -> None:
        """Forget the losses of the step that ended, reported or not."""
        self._loss_sum, self._losses, self.more = None, 0, {}

    def log_timers(self, global_step: int) -> None:
        """Log the step's timers; they start again at zero."""
        if isinstance(self.timers, Timers):
            names = [name for name in _TIMER_NAMES if self.timers.has_timer(name)]
            is_printed = self._every is None or self._is_printed(global_step)
            self.timers.log(names, ranks=[0] if is_printed else [], reset=True)

    def _events(self, s: StepSummary, of_experts: dict[str, float]) -> list[tuple[str, float, int]]:
        values: dict[str, float | None] = {
            "Train/Samples/train_loss": s.loss,
            **{f"Train/Samples/{name}": value for name, value in {**self.more, **of_experts}.items()},
            "Train/Samples/lr": s.lr[0] if s.lr else None,
            "Train/Samples/loss_scale": s.loss_scale,
            "Train/Samples/grad_norm": s.grad_norm,
        }
        if isinstance(self.timers, Timers):
            for name in _TIMER_NAMES:
                if self.timers.has_timer(name):
                    values[f"Train/Samples/elapsed_time_ms_{name}"] = self.timers(name).elapsed(reset=False)
        return [(name, value, s.global_samples) for name, value in values.items() if value is not None]


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
