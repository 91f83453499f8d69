"""A run in an Aim repository."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.config.monitor import AimConfig
from deepspeed.monitor.writer import Event, optional_package


class AimMonitor:
    """A run of `experiment`; `run_hash` continues one. Metrics alone: neither output nor use of the machine is recorded.

    Raises:
        MissingPackageError: the package `aim` is not installed.
    """

    def __init__(self, config: AimConfig) -> None:
        aim = optional_package("aim", "aim")
        self.run: Any = aim.Run(
            run_hash=config.run_hash,
            repo=config.repo,
            experiment=config.experiment,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Hand the events to Aim."""
        for name, value, samples in event_list:
            self.run.track(float(value), name=name, step=samples)

    def close(self) -> None:
        """Write what is left, and mark the run as finished."""
        self.run.close()
