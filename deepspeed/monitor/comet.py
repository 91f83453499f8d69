"""Comet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.config.monitor import CometConfig
from deepspeed.monitor.writer import Event, optional_package


class CometMonitor:
    """A Comet experiment. Of each metric a point is logged at most every `samples_log_interval` samples.

    Where the user's code has started one that suits the block (`comet_ml.start()`), points go there, as Comet has it, and
    `close` does not end it.

    Raises:
        MissingPackageError: the package `comet_ml` is not installed.
    """

    def __init__(self, config: CometConfig) -> None:
        comet_ml = optional_package("comet_ml", "comet")
        self.samples_log_interval = config.samples_log_interval
        users_experiment = comet_ml.get_running_experiment()
        self.experiment: Any = comet_ml.start(
            api_key=config.api_key,
            project=config.project,
            workspace=config.workspace,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        self._is_own = users_experiment is None or self.experiment is not users_experiment
        if config.experiment_name is not None:
            self.experiment.set_name(config.experiment_name)
        self._last_samples: dict[str, int] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Hand those events to Comet that are due; the first of each metric is."""
        for name, value, samples in event_list:
            last = self._last_samples.get(name)
            if last is None or samples - last >= self.samples_log_interval:
                self._last_samples[name] = samples
                self.experiment.log_metric(name, float(value), step=samples)

    def close(self) -> None:
        """End the experiment, unless it is the user's; offline, this writes its archive."""
        if self._is_own:
            self.experiment.end()
