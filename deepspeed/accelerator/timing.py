"""Wall-clock timers that wait for the current accelerator, under the documented name.

The stopwatches themselves are in `common.timing`, which knows no device.
"""

from __future__ import annotations

from deepspeed.accelerator.memory import memory_report
from deepspeed.accelerator.select import get_accelerator
from deepspeed.common.timing import Timers

__all__ = ["SynchronizedWallClockTimer"]


class SynchronizedWallClockTimer(Timers):
    """`Timers` that wait for the current accelerator before each reading and can describe its memory."""

    def __init__(self) -> None:
        super().__init__(get_accelerator().synchronize, memory_text=self.memory_usage)

    @staticmethod
    def memory_usage() -> str:
        """Return the memory in use now as one line."""
        return memory_report().text()
