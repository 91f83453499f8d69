"""Event files for TensorBoard."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.config.monitor import TensorBoardConfig
from deepspeed.monitor.writer import Event, optional_package


class TensorBoardMonitor:
    """Event files in `output_path/job_name`.

    A run that goes on in a folder where there are some already, from a checkpoint that is older than their end, writes some
    steps again: TensorBoard is told to show these in place of the old ones.

    Raises:
        MissingPackageError: the package `tensorboard` is not installed.
    """

    def __init__(self, config: TensorBoardConfig) -> None:
        tensorboard = optional_package("torch.utils.tensorboard", "tensorboard")
        self.log_dir = Path(config.output_path, config.job_name)
        self._goes_on = any(self.log_dir.glob("events.out.tfevents.*"))
        self.summary_writer: Any = tensorboard.SummaryWriter(log_dir=str(self.log_dir))

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write scalars, and flush the file."""
        if self._goes_on and event_list:
            self._goes_on = False
            self._hide_from(min(samples for _, _, samples in event_list))
        for name, value, samples in event_list:
            self.summary_writer.add_scalar(name, float(value), samples)
        self.summary_writer.flush()

    def _hide_from(self, samples: int) -> None:
        """Events of earlier files at `samples` and later are not shown any more."""
        event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        start = event.SessionLog(status=event.SessionLog.START)
        self.summary_writer.file_writer.add_event(event.Event(session_log=start), samples)

    def close(self) -> None:
        """Close the event file."""
        self.summary_writer.close()
