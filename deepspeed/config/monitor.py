"""Blocks that say where metrics go: `tensorboard`, `csv_monitor`, `wandb`, `comet`.

Each may stand at the top level or inside a block `monitor_config`. Lives here: keys and defaults. Does not live here: the
writers (`monitor`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from deepspeed.config.base import ConfigModel
from deepspeed.config.values import LowerCase, PositiveWhole

__all__ = ["CometConfig", "CsvMonitorConfig", "TensorBoardConfig", "WandbConfig"]


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
