"""Grids of coloured cells, and the rows of a pipeline's batch, as geometry. Pure; a template draws them.

    shares of tokens    layer x expert   colour: times the even share
    waits               rank x steps     colour: part of the time

Neighbours with one colour become one rectangle, and more than 64 rows or columns are joined, which the grid says.
Called by `sections`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.run_log import Checkpoint, Schedule
from deepspeed.run_report import texts
from deepspeed.run_report.reading import Attempt, Run
from deepspeed.run_report.scales import Scale, Tick
from deepspeed.run_report.tables import Table

__all__ = [
    "COLOURS",
    "Cell",
    "Grid",
    "Lane",
    "Timeline",
    "Work",
    "around_even",
    "grid",
    "history",
    "joined",
    "of_one",
    "span_of",
    "timeline",
]

COLOURS = 13  # 0 .. 12: classes of the style sheet; in a grid around an even share 6 is the even one
MOST = 64
_MOST_WORKS = 4000
_MOST_LANES = 40


@dataclass(frozen=True)
class Cell:
    """A rectangle of one colour: its left edge and width in columns."""

    left: int
    width: int
    colour: int


@dataclass(frozen=True)
class Grid:
    """Rows of cells."""

    ident: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    columns: int
    x_ticks: tuple[Tick, ...]
    legend: tuple[str, str]
    """Texts of the low end and the high end."""
    is_around: bool
    """Colours part at the middle: less on one side, more on the other."""
    table: Table
    note: str = ""


@dataclass(frozen=True)
class Work:
    """One block of a lane, in percent of its length."""

    left: float
    width: float
    kind: str
    label: str
    title: str


@dataclass(frozen=True)
class Lane:
    """What one stage does."""

    label: str
    works: tuple[Work, ...]


@dataclass(frozen=True)
class Timeline:
    """One batch of a pipeline: a lane for each stage."""

    title: str
    description: str
    lanes: tuple[Lane, ...]
    x_ticks: tuple[Tick, ...]
    kinds: tuple[tuple[str, str], ...]
    """Class and meaning of each kind of work."""
    note: str = ""

    @property
    def is_dense(self) -> bool:
        """Blocks are so many that a phone would show none of their labels: it scrolls instead."""
        return max((len(lane.works) for lane in self.lanes), default=0) > 24


def joined(rows: Sequence[Sequence[float]], columns: int) -> list[list[float]]:
    """Rows with at most `columns` places, each the largest of those it joins.

    Rows are of one length.
    """
    count = len(rows[0]) if rows else 0
    if count <= columns:
        return [list(row) for row in rows]
    edges = [at * count // columns for at in range(columns + 1)]
    return [[max(row[begin:end]) for begin, end in itertools.pairwise(edges)] for row in rows]


def grid(
    ident: str,
    title: str,
    description: str,
    named: Sequence[tuple[str, Sequence[float]]],
    colour: Sequence[Sequence[int]],
    *,
    x_ticks: Sequence[Tick],
    legend: tuple[str, str],
    table: Table,
    is_around: bool = False,
    note: str = "",
) -> Grid:
    """Merge neighbours of one colour.

    Args:
        ident: of the element on the page.
        title: of the grid.
        description: what it shows, for those who do not see it.
        named: name and values of each row.
        colour: a colour, 0 to 12, for each value.
        x_ticks: below the columns.
        legend: texts of the low end and the high end.
        table: its numbers.
        is_around: colours part at the middle.
        note: what was joined.
    """
    rows = tuple((name, _cells(colours)) for (name, _), colours in zip(named, colour, strict=True))
    columns = max((len(values) for _, values in named), default=0)
    return Grid(ident, title, description, rows, columns, tuple(x_ticks), legend, is_around, table, note)


def _cells(colours: Sequence[int]) -> tuple[Cell, ...]:
    cells, left = [], 0
    for colour, same in itertools.groupby(colours):
        width = len(list(same))
        cells.append(Cell(left, width, colour))
        left += width
    return tuple(cells)


def around_even(load: float) -> int:
    """The colour of a share in times the even one: 6 at 1, 0 at none, 12 at four times and more."""
    if load <= 1:
        return round(6 * max(0.0, load))
    return 6 + min(6, round(3 * math.log2(min(load, 4.0))))


def of_one(part: float) -> int:
    """The colour of a part of one."""
    return round((COLOURS - 1) * min(1.0, max(0.0, part)))


_KINDS = {"F": ("forward", "forward"), "B": ("backward", "backward"), "W": ("weights", "gradients of weights")}
_OTHER = ("other", "other work")


def timeline(schedule: Schedule) -> Timeline | None:
    """The lanes of a batch; None where its works are not told."""
    told = schedule.works or ()
    works = [work for work in told if work[2] >= work[1]][:_MOST_WORKS]
    if not works:
        return None
    begin, end = min(work[1] for work in works), max(work[2] for work in works)
    axis = Scale(begin, end if end > begin else begin + 1)
    stages = sorted({work[0] for work in works})
    lanes = [Lane(f"stage {stage}", tuple(_work(work, axis) for work in works if work[0] == stage)) for stage in stages]
    used = {_kind(work[3]) for work in works}
    ticks = Scale(0, axis.high - begin).ticks(texts.seconds)
    batches = f"{schedule.micro_batches} micro-batches" if schedule.micro_batches else "one batch"
    bubble = f" Stages stand idle for {texts.share(schedule.bubble)} of it." if schedule.bubble is not None else ""
    left_out = len(told) - len(works)
    return Timeline(
        f"{schedule.name or 'Schedule'}: {batches} over {len(stages)} stages",
        f"Each row is a stage, each block one micro-batch's work, in {texts.seconds(end - begin)}.{bubble}",
        tuple(lanes),
        tuple(ticks),
        tuple(kind for kind in (*_KINDS.values(), _OTHER) if kind in used),
        f"The first {_MOST_WORKS} works are drawn, {left_out} are left out." if left_out > 0 else "",
    )


def history(run: Run, told: Sequence[Checkpoint]) -> Timeline:
    """Attempts and checkpoints in the time of the clock."""
    begin, end = run.attempts[0].begin, max(attempt.end for attempt in run.attempts)
    axis = Scale(begin, end if end > begin else begin + 1)
    shown = run.attempts[-_MOST_LANES:]
    first = len(run.attempts) - len(shown) + 1
    lanes = [Lane(f"attempt {at}", (_span(attempt, axis),)) for at, attempt in enumerate(shown, start=first)]
    saves = tuple(_moment(each, axis) for each in told)
    lanes += [Lane("checkpoints", saves)] if saves else []
    kinds = [("attempt", "training")]
    kinds += [("save", "checkpoint saved")] if any(each.action != "load" for each in told) else []
    kinds += [("load", "checkpoint loaded")] if any(each.action == "load" for each in told) else []
    return Timeline(
        "The run over time",
        f"{len(run.attempts)} attempt(s) in {texts.duration(end - begin)}, from {texts.clock(begin)} UTC on; "
        f"{len(told)} checkpoint(s).",
        tuple(lanes),
        tuple(Scale(0, axis.high - begin).ticks(lambda value: texts.seconds(value) if value else "0")),
        tuple(kinds),
        f"The last {len(shown)} attempts are drawn." if first > 1 else "",
    )


def span_of(attempt: Attempt) -> str:
    """The first and the last reported step; empty where there is none."""
    steps = attempt.steps.column("step")
    return f"{steps[0]:,.0f} to {steps[-1]:,.0f}" if len(steps) else ""


def _span(attempt: Attempt, axis: Scale) -> Work:
    left = 100 * axis.at(attempt.begin)
    label = span_of(attempt)
    title = f"steps {label or 'none'}, {texts.duration(attempt.end - attempt.begin)}"
    return Work(left, 100 * axis.at(attempt.end) - left, "attempt", label, title)


def _moment(told: Checkpoint, axis: Scale) -> Work:
    """A checkpoint: its record is written when it is done."""
    seconds = told.seconds or 0.0
    left = 100 * axis.at(told.time - seconds)
    kind = "load" if told.action == "load" else "save"
    return Work(left, 100 * axis.at(told.time) - left, kind, "", f"{told.tag or kind}: {texts.seconds(told.seconds)}")


def _work(work: tuple[int, float, float, str, int | None], axis: Scale) -> Work:
    stage, begin, end, kind, micro_batch = work
    left = 100 * axis.at(begin)
    label = "" if micro_batch is None else str(micro_batch)
    of = f" of micro-batch {micro_batch}" if micro_batch is not None else ""
    title = f"stage {stage}, {_kind(kind)[1]}{of}: {texts.seconds(end - begin)}"
    return Work(left, max(0.0, 100 * axis.at(end) - left), _kind(kind)[0], label, title)


def _kind(told: str) -> tuple[str, str]:
    """Class and meaning of a kind of work; where an order has W, its B makes gradients of inputs alone."""
    return _KINDS.get(told, _OTHER)
