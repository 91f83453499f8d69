"""Blocks for metrics: `tensorboard`, `csv_monitor`, `wandb`, `comet`, `mlflow`, `aim`, `prometheus`; and `run_log`.

Each but the last may stand at the top level or inside a block `monitor_config`. Lives here: keys and defaults. Does not
live here: the writers (`monitor`, `run_log`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from deepspeed.config.base import ConfigModel
from deepspeed.config.values import LowerCase, Port, PositiveWhole

__all__ = [
    "AimConfig",
    "CometConfig",
    "CsvMonitorConfig",
    "MlflowConfig",
    "PrometheusConfig",
    "RunLogConfig",
    "TensorBoardConfig",
    "WandbConfig",
]


class TensorBoardConfig(ConfigModel):
    """`tensorboard`: event files for TensorBoard, written by rank 0."""

    enabled: bool = False
    """Write them."""

    output_path: str = ""
    """Directory; empty is the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Directory of this run below `output_path`."""


class CsvMonitorConfig(ConfigModel):
    """`csv_monitor`: one CSV file per metric, written by rank 0."""

    enabled: bool = False
    """Write them."""

    output_path: str = ""
    """Directory; empty is the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Directory of this run below `output_path`."""


class WandbConfig(ConfigModel):
    """`wandb`: Weights & Biases, from rank 0."""

    enabled: bool = False
    """Log there."""

    group: str | None = None
    """Group of runs."""

    team: str | None = None
    """Team (entity) that owns the project."""

    project: str = "deepspeed"
    """Project."""


class CometConfig(ConfigModel):
    """`comet`: Comet, from rank 0. Left-out keys are taken from Comet's own settings."""

    enabled: bool = False
    """Log there."""

    samples_log_interval: PositiveWhole = 100
    """Samples between two logged points; > 0."""

    project: str | None = None
    """Project."""

    workspace: str | None = None
    """Workspace that owns the project."""

    api_key: str | None = None
    """Key of the account; better kept in Comet's own settings than in this file."""

    experiment_name: str | None = None
    """Name shown for the experiment."""

    experiment_key: str | None = None
    """Key of the experiment to continue or create."""

    online: bool | None = None
    """False writes an archive on this machine to upload later."""

    mode: Annotated[Literal["get", "create", "get_or_create"], LowerCase] | None = None
    """Continue an experiment, start one, or whichever is possible."""


class RunLogConfig(ConfigModel):
    """`run_log`: what the run does, one JSON object a line and one file per rank. Ours."""

    enabled: bool = False
    """Write it. The first rank decides whether there is one, and which steps are in it; ranks without it write no file."""

    output_path: str = ""
    """Directory; empty is the working directory."""

    job_name: str = Field("DeepSpeedJobName", min_length=1)
    """Directory of this run below `output_path`. A later run appends to the files there; an engine that is made while
    another one of the process writes there has a directory of its own in it, `engine-2` and so on."""

    every: PositiveWhole = 1
    """Global steps from one reported step to the next; > 0. The first rank's value counts for all."""


class MlflowConfig(ConfigModel):
    """`mlflow`: a run of an MLflow tracking store, from rank 0. Ours."""

    enabled: bool = False
    """Log there."""

    tracking_uri: str | None = None
    """A server, such as `https://host:5000`, or a database, such as `sqlite:///runs.db`. Left out: MLflow's own setting, the
    variable MLFLOW_TRACKING_URI, else a file in the working directory."""

    experiment: str = "deepspeed"
    """Experiment; made when there is none of that name."""

    run_name: str | None = None
    """Name shown for the run; left out: MLflow makes one up."""

    run_id: str | None = None
    """Run to continue; `experiment` does not count then."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run, name to text."""


class AimConfig(ConfigModel):
    """`aim`: a run in an Aim repository, from rank 0. Ours."""

    enabled: bool = False
    """Log there."""

    repo: str | None = None
    """Directory that holds the repository, or `aim://host:port`. Left out: Aim's own setting, else the working directory."""

    experiment: str = "deepspeed"
    """Experiment."""

    run_hash: str | None = None
    """Run to continue."""


class PrometheusConfig(ConfigModel):
    """`prometheus`: an HTTP endpoint on rank 0 that a Prometheus server fetches the newest values from. Ours."""

    enabled: bool = False
    """Listen, from `deepspeed.initialize` to the engine's `destroy()`."""

    host: str = "127.0.0.1"
    """Address to listen at. The default is reached from rank 0's host alone; `0.0.0.0` by whoever reaches the host: there is
    neither password nor encryption."""

    port: Port = 0
    """Port; 0: a free one, which is logged."""

    job_name: str = "DeepSpeedJobName"
    """Value of the label `job`."""
