"""TensorBoard, CSV files, Weights & Biases and Comet behind one protocol.

An event is `(name, value, samples)`: a metric such as "Train/Samples/lr", its number, and the samples trained so far, which
is the x axis. TensorBoard and CSV rows are with the operating system when `write_events` returns, so a run that is killed
keeps them; wandb and Comet keep buffers of their own, which they write as they see fit and at `close`.

Not here: which metrics there are (`engine.report`), and which rank writes (`master`).
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, TextIO

from deepspeed.config.monitor import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from deepspeed.errors import MissingPackageError

Event = tuple[str, SupportsFloat, int]


class Writer(Protocol):
    """Takes events."""

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write them, oldest first."""

    def close(self) -> None:
        """Write nothing more, and let go of files and connections."""


class TensorBoardMonitor:
    """Event files in `output_path/job_name`.

    Raises:
        MissingPackageError: the package `tensorboard` is not installed.
    """

    def __init__(self, config: TensorBoardConfig) -> None:
        tensorboard = _optional("torch.utils.tensorboard", "tensorboard")
        self.log_dir = Path(config.output_path, config.job_name)
        self.summary_writer: Any = tensorboard.SummaryWriter(log_dir=str(self.log_dir))

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write scalars, and flush the file."""
        for name, value, samples in event_list:
            self.summary_writer.add_scalar(name, float(value), samples)
        self.summary_writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.summary_writer.close()


class CsvMonitor:
    """One file per metric in `output_path/job_name`, appended to when it is there already.

    "Train/Samples/lr" goes to Train_Samples_lr.csv, with the header `step,lr`.
    """

    def __init__(self, config: CsvMonitorConfig) -> None:
        self.log_dir = Path(config.output_path, config.job_name)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Append one row per event, and flush the files."""
        touched = {}
        for name, value, samples in event_list:
            file = touched[name] = self._file(name)
            csv.writer(file).writerow([samples, float(value)])
        for file in touched.values():
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, name: str) -> TextIO:
        stem = name.replace("/", "_").replace(" ", "_")
        if stem not in self._files:
            path = self.log_dir / f"{stem}.csv"
            before = path.read_bytes()[-1:] if path.exists() else b""
            file = self._files[stem] = path.open("a", newline="", encoding="utf-8")
            if not before:
                csv.writer(file).writerow(["step", name.rsplit("/", maxsplit=1)[-1]])
            elif before != b"\n":
                file.write("\r\n")  # the last row of a killed run was cut
        return self._files[stem]


class WandbMonitor:
    """A Weights & Biases run; the environment variable WANDB_MODE=offline keeps it on this machine.

    Raises:
        MissingPackageError: the package `wandb` is not installed.
    """

    def __init__(self, config: WandbConfig) -> None:
        wandb = _optional("wandb", "wandb")
        self.run: Any = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Hand the events to wandb's own process, those of one x value together."""
        rows: dict[int, dict[str, float]] = {}
        for name, value, samples in event_list:
            rows.setdefault(samples, {})[name] = float(value)
        for samples, row in rows.items():
            self.run.log(row, step=samples)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class CometMonitor:
    """A Comet experiment. Of each metric a point is logged at most every `samples_log_interval` samples.

    Raises:
        MissingPackageError: the package `comet_ml` is not installed.
    """

    def __init__(self, config: CometConfig) -> None:
        comet_ml = _optional("comet_ml", "comet")
        self.samples_log_interval = config.samples_log_interval
        self.experiment: Any = comet_ml.start(
            api_key=config.api_key,
            project=config.project,
            workspace=config.workspace,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
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
        """End the experiment; offline, this writes its archive."""
        self.experiment.end()


def _optional(module: str, extra: str) -> Any:
    """Import the package that the block `extra` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f'the config enables "{extra}", whose package cannot be imported ({error}). '
            f"Install it with: pip install 'deepspeed[{extra}]', or set {extra}.enabled to false."
        ) from error
