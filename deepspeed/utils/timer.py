"""Door to the timers."""

from __future__ import annotations

from deepspeed.accelerator.timing import SynchronizedWallClockTimer
from deepspeed.common.timing import NullTimers as NoopTimer
from deepspeed.common.timing import ThroughputTimer

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]
