"""What every writer does, and how it finds its package.

An event is `(name, value, samples)`: a metric such as "Train/Samples/lr", its number, and the samples trained so far, which
is the x axis.

    module          where events go                       there when `write_events` returns
    tensorboard     event files                           yes: a run that is killed keeps them
    csv_files       a CSV file per metric                 yes
    mlflow          a run of an MLflow tracking server    yes
    prometheus      the values that a scraper fetches     yes, while the run lasts
    wandb, comet    files or a server, by the package     no: as the package sees fit, the rest at `close`
    aim             a run in an Aim repository            no: within a second or so, the rest at `close`

Not here: which metrics there are (`engine.report`), and which rank writes (`master`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, SupportsFloat

from deepspeed.errors import MissingPackageError

Event = tuple[str, SupportsFloat, int]


class Writer(Protocol):
    """Takes events."""

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Write them, oldest first."""

    def close(self) -> None:
        """Write nothing more, and let go of files and connections."""


def optional_package(module: str, extra: str) -> Any:
    """Import the package that the block `extra` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f'the config enables "{extra}", whose package cannot be imported ({error}). '
            f"Install it with: pip install 'deepspeed[{extra}]', or set {extra}.enabled to false."
        ) from error
