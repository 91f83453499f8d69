"""What is known of one global step when it is reported: made by the engine, told by `report` and `step_log`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["StepSummary"]


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
