"""What sections are made of, and what several of them need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.run_report import texts
from deepspeed.run_report.charts import LineChart
from deepspeed.run_report.grids import Grid, Timeline
from deepspeed.run_report.tables import Table

__all__ = ["ROWS", "Absent", "Block", "Section", "left_out", "of_charts", "per_second"]

ROWS = 200
"""Most rows of a table."""


@dataclass(frozen=True)
class Block:
    """One thing in a section, by the name of the template's macro that draws it."""

    macro: str
    content: LineChart | Grid | Timeline | Table | str
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A heading with what belongs to it."""

    ident: str
    title: str
    intro: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Absent:
    """Something that the log does not tell, and what would make it."""

    title: str
    cure: str


def of_charts(ident: str, title: str, intro: str, charts: Sequence[LineChart | None]) -> Section | None:
    """A section of those charts that there are; None: there is none."""
    blocks = tuple(Block("line_chart", chart) for chart in charts if chart is not None)
    return Section(ident, title, intro, blocks) if blocks else None


def per_second(value: float | None) -> str:
    """Bytes per second."""
    return texts.UNKNOWN if value is None else texts.count(value, "B/s")


def left_out(count: int, what: str, most: int = ROWS) -> str:
    """What is said below a table or grid that shows the first `most` of many."""
    return f"The first {most} of {count:,} {what} are shown." if count > most else ""
