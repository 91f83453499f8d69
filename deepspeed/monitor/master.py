"""MonitorMaster: the writers that a config enables, on rank 0.

Does not live here: the writers (`writers`), which events there are (`engine.report`). Built by `engine.build`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from deepspeed import comm
from deepspeed.config.monitor import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.monitor.writers import CometMonitor, CsvMonitor, Event, TensorBoardMonitor, WandbMonitor, Writer


class MonitorConfig(Protocol):
    """The part of the config that this room reads."""

    @property
    def tensorboard(self) -> TensorBoardConfig:
        """The block `tensorboard`."""

    @property
    def wandb(self) -> WandbConfig:
        """The block `wandb`."""

    @property
    def csv_monitor(self) -> CsvMonitorConfig:
        """The block `csv_monitor`."""

    @property
    def comet(self) -> CometConfig:
        """The block `comet`."""


class MonitorMaster:
    """Hands events to every enabled writer; ranks other than 0 have none and do nothing.

    Args:
        monitor_config: the four blocks.

    Raises:
        MissingPackageError: an enabled writer's package is not installed (rank 0).
    """

    def __init__(self, monitor_config: MonitorConfig) -> None:
        blocks = (monitor_config.tensorboard, monitor_config.wandb, monitor_config.csv_monitor, monitor_config.comet)
        self.enabled = any(block.enabled for block in blocks)
        """Whether any writer is enabled: the same on all ranks."""
        is_first = not comm.is_initialized() or comm.get_rank() == 0
        self.writers: tuple[Writer, ...] = tuple(_enabled(monitor_config)) if is_first else ()

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write `(name, value, samples)` events to every writer of this rank."""
        for writer in self.writers:
            writer.write_events(event_list)

    def close(self) -> None:
        """Close every writer of this rank."""
        for writer in self.writers:
            writer.close()


def _enabled(config: MonitorConfig) -> Iterator[Writer]:
    if config.tensorboard.enabled:
        yield TensorBoardMonitor(config.tensorboard)
    if config.wandb.enabled:
        yield WandbMonitor(config.wandb)
    if config.csv_monitor.enabled:
        yield CsvMonitor(config.csv_monitor)
    if config.comet.enabled:
        yield CometMonitor(config.comet)
