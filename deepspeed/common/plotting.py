"""Empty figures of matplotlib, which is optional.

Lives here: the one way to get one. Does not live here: what is drawn (`bench.table`, `pipe.drawing`, the callers).
"""

from __future__ import annotations

import importlib
from typing import Any

from deepspeed.errors import MissingPackageError

__all__ = ["new_figure"]


def new_figure(width: float, height: float, asked_by: str) -> Any:
    """Return a `matplotlib.figure.Figure` of that size in inches, drawn into files alone.

    Args:
        width: in inches.
        height: in inches.
        asked_by: the option that wants a picture, for the error.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingPackageError(f"{asked_by} needs matplotlib: pip install 'deepspeed[plot]'.") from error
    return figures.Figure(figsize=(width, height), layout="constrained")
