"""A run of an MLflow tracking store: a server, or a database file on this machine.

The client is our own, so MLflow's current run, which the user's code may have started, is neither used nor ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from deepspeed.common.logging import get_logger
from deepspeed.config.monitor import MlflowConfig
from deepspeed.monitor.writer import Event, optional_package

logger = get_logger(__name__)

_BATCH = 1000  # metrics that MLflow takes in one request
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")


class MlflowMonitor:
    """A run in `experiment`, which is made when there is none of that name; `run_id` continues one.

    Events are with the store when `write_events` returns. A store that takes no more of them while the run lasts is warned
    of once and left alone from then on: training goes on without it.

    Raises:
        MissingPackageError: the package `mlflow` is not installed.
        mlflow.exceptions.MlflowException: the store cannot be reached, or has no run `run_id`.
    """

    def __init__(self, config: MlflowConfig) -> None:
        mlflow = optional_package("mlflow", "mlflow")
        self._refused: type[Exception] = mlflow.exceptions.MlflowException
        self._metric: Any = mlflow.entities.Metric
        self.client: Any = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
        self.run_id: str = config.run_id or self._new_run(config)
        self._is_lost = False
        if config.run_id is not None:
            self.client.update_run(self.run_id, status="RUNNING", name=config.run_name)
            for key, value in config.tags.items():
                self.client.set_tag(self.run_id, key, value)

    def _new_run(self, config: MlflowConfig) -> str:
        found = self.client.get_experiment_by_name(config.experiment)
        experiment_id = self.client.create_experiment(config.experiment) if found is None else found.experiment_id
        return str(self.client.create_run(experiment_id, run_name=config.run_name, tags=config.tags).info.run_id)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Store the events, a request for every 1000 of them. What MLflow allows in no name becomes "_"."""
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(_NOT_IN_NAMES.sub("_", name), float(value), now_ms, samples) for name, value, samples in event_list
        ]
        for first in range(0, len(metrics), _BATCH):
            if not self._is_lost:
                self._store(metrics[first : first + _BATCH])

    def _store(self, metrics: Sequence[Any]) -> None:
        try:
            self.client.log_batch(self.run_id, metrics=metrics, synchronous=True)
        except self._refused as error:
            self._is_lost = True
            logger.warning(
                "MLflow run %s takes no events from sample %d on, so no more are written there; training goes on (%s). "
                "Look after the store at mlflow.tracking_uri, and restart with mlflow.run_id to continue the run.",
                self.run_id,
                metrics[0].step,
                error,
            )

    def close(self) -> None:
        """Mark the run as finished."""
        if not self._is_lost:
            self.client.set_terminated(self.run_id, status="FINISHED")
