"""How the commands show what they found: tables for people, JSON for programs.

Lives here: the record that a command hands back, the look of tables, sizes in words. Does not live here: what is shown.
Called by every command of this folder and by `main`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["DAMAGED", "FINE", "WRONG_USE", "Report", "dtype_text", "line", "nbytes_text", "plain", "show", "table"]

FINE, DAMAGED, WRONG_USE = 0, 1, 2
"""Exit statuses; DAMAGED also stands for two checkpoints that differ."""

_WIDTH_OF_A_PIPE = 160
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class Report:
    """What one command found."""

    record: Mapping[str, Any]
    """For `--json`: anything that `plain` takes."""

    shown: list[RenderableType] = field(default_factory=list)
    """For people, from top to bottom."""

    status: int = FINE


def show(report: Report, *, as_json: bool) -> int:
    """Print a report to standard output and return its exit status."""
    if as_json:
        sys.stdout.write(json.dumps(plain(report.record), indent=1, allow_nan=False) + "\n")
        return report.status
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_A_PIPE)
    for part in report.shown:
        console.print(part)
    return report.status


def line(text: str, style: str = "") -> Text:
    """A line of plain text: square brackets in names are no markup."""
    return Text(text, style=style)


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], right: Iterable[str] = ()) -> Table:
    """A table that folds long cells instead of cutting them off.

    Args:
        title: what it shows; empty for none.
        columns: headings.
        rows: cells; a `Text` keeps its style, None is shown as "-".
        right: headings of the columns that hold numbers.
    """
    made = Table(title=Text(title) if title else None, title_justify="left", title_style="bold", box=SIMPLE, pad_edge=False)
    for heading in columns:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text("-" if cell is None else str(cell)) for cell in row))
    return made


def nbytes_text(nbytes: float) -> str:
    """Bytes in words, decimal: `512 B`, `1.50 GB`."""
    power = 0
    while nbytes >= 999.5 and power < len(_UNITS) - 1:
        nbytes /= 1000
        power += 1
    return f"{nbytes:.0f} B" if power == 0 else f"{nbytes:.3g} {_UNITS[power]}"


def dtype_text(dtype: torch.dtype) -> str:
    """Name of an element type without the package: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """A value as JSON has it. Tensors are described, not printed; what JSON lacks becomes text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, torch.Tensor):
        return f"tensor {dtype_text(value.dtype)} {list(value.shape)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
