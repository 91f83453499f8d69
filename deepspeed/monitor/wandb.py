"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.config.monitor import WandbConfig
from deepspeed.monitor.writer import Event, optional_package


class WandbMonitor:
    """A Weights & Biases run; the environment variable WANDB_MODE=offline keeps it on this machine.

    Where the user's code has started one (`wandb.init()`), events go there, as wandb has it, and `close` leaves it running.

    Raises:
        MissingPackageError: the package `wandb` is not installed.
    """

    def __init__(self, config: WandbConfig) -> None:
        wandb = optional_package("wandb", "wandb")
        users_run = wandb.run
        self.run: Any = wandb.init(project=config.project, group=config.group, entity=config.team)
        self._is_own = users_run is None or self.run is not users_run

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Hand the events to wandb's own process, those of one x value together."""
        rows: dict[int, dict[str, float]] = {}
        for name, value, samples in event_list:
            rows.setdefault(samples, {})[name] = float(value)
        for samples, row in rows.items():
            self.run.log(row, step=samples)

    def close(self) -> None:
        """Finish the run, unless it is the user's."""
        if self._is_own:
            self.run.finish()
