"""MonitorMaster: the writers that a config enables, on rank 0.

A writer that cannot start is an error. One that fails later is warned of and left out: a chart is no reason to end a run.

Does not live here: the writers (a module each), which events there are (`engine.report`). Built by `engine.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from deepspeed import comm
from deepspeed.common.logging import get_logger
from deepspeed.config.monitor import (
    AimConfig,
    CometConfig,
    CsvMonitorConfig,
    MlflowConfig,
    PrometheusConfig,
    TensorBoardConfig,
    WandbConfig,
)
from deepspeed.errors import ArgumentError, DeepSpeedError, MonitorError
from deepspeed.monitor.aim import AimMonitor
from deepspeed.monitor.comet import CometMonitor
from deepspeed.monitor.csv_files import CsvMonitor
from deepspeed.monitor.mlflow import MlflowMonitor
from deepspeed.monitor.prometheus import PrometheusMonitor
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.monitor.writer import Event, Writer

logger = get_logger(__name__)

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
        MonitorError: an enabled writer cannot start, whatever its package raised (rank 0). What had started is closed.
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
                    writer = _started(name, getattr(monitor_config, name))
                    started.callback(writer.close)
                    self.writers += (writer,)
                started.pop_all()  # all have started: nothing is to be closed

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write `(name, value, samples)` events to every writer of this rank.

        A writer that fails gets no more events: that is said with its error, and the others and training go on.

        Raises:
            ArgumentError: an event's value is no number (on a rank that writes; others do not look).
        """
        events = [_checked(event) for event in event_list] if self.writers else []
        for writer in self.writers:
            try:
                writer.write_events(events)
            except Exception as error:  # whatever a package raises
                self._give_up(writer, error)

    def _give_up(self, writer: Writer, error: Exception) -> None:
        self.writers = tuple(each for each in self.writers if each is not writer)
        logger.warning(
            "%s takes no more events (%s: %s): none are written there from here on, and training goes on. Look after what "
            "it says, such as the room on the disk, before the next run.",
            type(writer).__name__,
            type(error).__name__,
            error,
            exc_info=error,
        )
        try:
            writer.close()
        except Exception as after:  # it is broken already
            logger.debug("%s could not be closed either: %s", type(writer).__name__, after)

    def close(self) -> None:
        """Close every writer of this rank, each whatever becomes of the others. Events after that are written nowhere."""
        writers, self.writers = self.writers, ()
        with ExitStack() as stack:
            for writer in writers:
                stack.callback(writer.close)


def _started(name: str, block: Any) -> Writer:
    """The writer of the block `name`.

    Raises:
        DeepSpeedError: the writer's own, or a MonitorError around what its package raised.
    """
    try:
        return _WRITERS[name](block)
    except DeepSpeedError:
        raise
    except Exception as error:  # whatever a package raises
        raise MonitorError(
            f"the config enables {name!r}, which cannot start ({type(error).__name__}: {error}); needed what the guide's "
            f"page on monitors says of it, such as a folder that can be written to, or an account. Correct the block "
            f"{name!r}, or set {name}.enabled to false."
        ) from error


def _checked(event: Event) -> Event:
    name, value, samples = event
    try:
        return name, float(value), samples
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"write_events(): the value of {name!r} is {value!r}; needed one number, such as a float or a tensor of one "
            "element. Convert it first."
        ) from error
