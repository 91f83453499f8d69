"""MonitorMaster: the writers that a config enables, on rank 0.

Does not live here: the writers (`writers`), which events there are (`engine.report`). Built by `engine.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from deepspeed import comm
from deepspeed.config.monitor import (
    AimConfig,
    CometConfig,
    CsvMonitorConfig,
    MlflowConfig,
    PrometheusConfig,
    TensorBoardConfig,
    WandbConfig,
)
from deepspeed.monitor.aim import AimMonitor
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.csv_files import CsvMonitor
from deepspeed.monitor.mlflow import MlflowMonitor
from deepspeed.monitor.prometheus import PrometheusMonitor
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.monitor.writer import Event, Writer

_WRITERS: dict[str, Callable[[Any], Writer]] = {
    "tensorboard": TensorBoardMonitor,
    "wandb": WandbMonitor,
    "csv_monitor": CsvMonitor,
    "comet": CometMonitor,
    "mlflow": MlflowMonitor,
    "aim": AimMonitor,
    "prometheus": PrometheusMonitor,
}
"""Block -> the writer that it configures."""


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

    @property
    def mlflow(self) -> MlflowConfig:
        """The block `mlflow`."""

    @property
    def aim(self) -> AimConfig:
        """The block `aim`."""

    @property
    def prometheus(self) -> PrometheusConfig:
        """The block `prometheus`."""


class MonitorMaster:
    """Hands events to every enabled writer; ranks other than 0 have none and do nothing.

    Args:
        monitor_config: the blocks.

    Raises:
        MissingPackageError: an enabled writer's package is not installed (rank 0).
        MonitorError: an enabled writer cannot start (rank 0). Writers that had started are closed.
    """

    def __init__(self, monitor_config: MonitorConfig) -> None:
        enabled = [name for name in _WRITERS if getattr(monitor_config, name).enabled]
        self.enabled = bool(enabled)
        """Whether any writer is enabled: the same on all ranks."""
        is_first = not comm.is_initialized() or comm.get_rank() == 0
        self.writers: tuple[Writer, ...] = ()
        if is_first:
            with ExitStack() as started:
                for name in enabled:
                    writer = _WRITERS[name](getattr(monitor_config, name))
                    started.callback(writer.close)
                    self.writers += (writer,)
                started.pop_all()  # all have started: nothing is to be closed

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write `(name, value, samples)` events to every writer of this rank."""
        for writer in self.writers:
            writer.write_events(event_list)

    def close(self) -> None:
        """Close every writer of this rank, each whatever becomes of the others. Events after that are written nowhere."""
        writers, self.writers = self.writers, ()
        with ExitStack() as stack:
            for writer in writers:
                stack.callback(writer.close)
