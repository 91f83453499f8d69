"""Charts as geometry: places in percent and SVG paths, which a template draws. Pure; nothing here is markup.

    curves -> axis ranges -> outline of at most 400 buckets -> path "M0 9120L25 9034..." on a square of 10,000 units

The square is stretched to whatever width the page has, so labels are text of the page and keep their size on a phone.
A path has all that reading its values needs (`page.js`). Every chart comes with its numbers as a table.

Called by `sections`. Does not live here: what is drawn (`facts`), colours (`page.css`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepspeed.run_report.columns import Numbers
from deepspeed.run_report.facts import Curve
from deepspeed.run_report.sampling import averaged, evenly, outline
from deepspeed.run_report.scales import Scale, Tick, scale_of, step_scale, step_ticks
from deepspeed.run_report.tables import Table

__all__ = ["BUCKETS", "Legend", "Line", "LineChart", "Mark", "Unit", "line_chart", "stacked_chart"]

Unit = Literal["number", "bytes", "seconds", "share", "rate"]

BUCKETS = 400
SQUARE = 10_000
STYLES = 8  # colours with their dashes; later lines begin anew
_ROWS = 21
_MOST_MARKS = 80


@dataclass(frozen=True)
class Line:
    """A curve's path, or with `is_area` the outline of its layer of a stack."""

    name: str
    path: str
    style: int
    last: str = ""
    """The last value, as text."""
    is_faint: bool = False
    is_area: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: float
    kind: Literal["save", "restart"]


@dataclass(frozen=True)
class Level:
    """A value that holds at all steps, such as a plan."""

    at: float
    label: str


@dataclass(frozen=True)
class Legend:
    """What a sign on the chart means."""

    kind: str
    style: int
    label: str


@dataclass(frozen=True)
class LineChart:
    """Values over steps."""

    ident: str
    title: str
    description: str
    unit: Unit
    x: Scale
    y: Scale
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    levels: tuple[Level, ...]
    marks: tuple[tuple[float, str], ...]
    """Place in percent, kind."""
    legend: tuple[Legend, ...]
    table: Table
    note: str = ""
    is_wide: bool = False
    """It takes the whole width of its section."""

    @property
    def y_width(self) -> int:
        """Letters of the longest label of the vertical axis, or of the word below it."""
        return max([len("step"), *(len(tick.label) for tick in self.y_ticks)])


def line_chart(
    ident: str,
    title: str,
    curves: Sequence[Curve],
    text: Callable[[float | None], str],
    unit: Unit = "number",
    *,
    faint: Sequence[Curve] = (),
    levels: Sequence[tuple[str, float]] = (),
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    may_be_log: bool = False,
    is_wide: bool = False,
) -> LineChart | None:
    """Draw curves; None where no value of them is known.

    Args:
        ident: of the element on the page.
        title: of the chart.
        curves: what is drawn.
        text: writes a value.
        unit: the same for readers by script.
        faint: curves that belong to the first one's colour, drawn behind.
        levels: lines across, with their names.
        marks: saves and restarts.
        from_zero: the axis begins at zero.
        may_be_log: it may be logarithmic.
        is_wide: it takes the whole width of its section.
    """
    drawn = [curve for curve in curves if len(curve.known)]
    if not drawn:
        return None
    behind = [curve for curve in faint if len(curve.known)]
    values = [end for curve in (*drawn, *behind) for end in _ends(curve.known)] + [value for _, value in levels]
    y = scale_of(values, from_zero=from_zero, may_be_log=may_be_log)
    x = step_scale(end for curve in (*drawn, *behind) for end in _ends(curve.steps))
    lines = [Line(curve.name, _path(curve, x, y), at % STYLES, text(curve.last)) for at, curve in enumerate(drawn)]
    lines = [Line(curve.name, _path(curve, x, y), 0, is_faint=True) for curve in behind] + lines
    steps = max(len(curve.steps) for curve in drawn)
    return LineChart(
        ident,
        title,
        _description(drawn, text, marks, y),
        unit,
        x,
        y,
        tuple(step_ticks(x)),
        tuple(y.ticks(text)),
        tuple(lines),
        tuple(Level(100 * y.at(value), f"{name}: {text(value)}") for name, value in levels),
        _places(marks, x),
        _legend(lines, marks),
        _table(title, drawn, text),
        _fewer(steps, "the lowest and highest value of each bucket are drawn") if steps > 2 * BUCKETS else "",
        is_wide,
    )


def stacked_chart(
    ident: str,
    title: str,
    steps: Numbers,
    layers: Sequence[tuple[str, Numbers]],
    text: Callable[[float | None], str],
    unit: Unit,
    marks: Sequence[Mark] = (),
) -> LineChart | None:
    """Layers on each other, the first at the bottom; None where there is no step.

    Args:
        ident: of the element on the page.
        title: of the chart.
        steps: ascending.
        layers: name, and a value >= 0 for each step.
        text: writes a value.
        unit: the same for readers by script.
        marks: saves and restarts.
    """
    if len(steps) == 0 or not layers:
        return None
    at = averaged(steps, BUCKETS)
    edges = [np.zeros(len(at))]
    for _, values in layers:
        edges.append(edges[-1] + averaged(values, BUCKETS))
    x, y = step_scale(_ends(steps)), scale_of(_ends(edges[-1]), from_zero=True)
    lines = tuple(
        Line(name, _layer(at, below, above, x, y), place % STYLES, text(float(values[-1])), is_area=True)
        for place, ((name, values), (below, above)) in enumerate(zip(layers, itertools.pairwise(edges), strict=True))
    )
    curves = [Curve(name, steps, values) for name, values in layers]
    return LineChart(
        ident,
        title,
        _description(curves, text, marks, y),
        unit,
        x,
        y,
        tuple(step_ticks(x)),
        tuple(y.ticks(text)),
        lines,
        (),
        _places(marks, x),
        _legend(lines, marks),
        _table(title, curves, text),
        _fewer(len(steps), "means of buckets are drawn") if len(steps) > BUCKETS else "",
        is_wide=True,
    )


def _ends(values: Numbers) -> tuple[float, float]:
    """The lowest and the highest."""
    return float(values.min()), float(values.max())


def _path(curve: Curve, x: Scale, y: Scale) -> str:
    """The outline of a curve; it breaks where values are not known, and a value alone is a dot."""
    parts: list[str] = []
    is_open, is_dot = False, False
    for at in outline(curve.values, BUCKETS):
        step, value = float(curve.steps[at]), float(curve.values[at])
        if math.isnan(value):
            parts += ["h1"] if is_dot else []
            is_open = is_dot = False
            continue
        parts.append(("L" if is_open else "M") + _place(x.at(step), y.at(value)))
        is_open, is_dot = True, not is_open
    return "".join([*parts, "h1"] if is_dot else parts)


def _layer(steps: Numbers, below: Numbers, above: Numbers, x: Scale, y: Scale) -> str:
    """A closed outline: along the upper edge, back along the lower one."""
    if len(steps) == 1:  # one step alone is a block of the chart's width
        steps, below, above = np.array([x.low, x.high]), np.repeat(below, 2), np.repeat(above, 2)
    there = [_place(x.at(step), y.at(value)) for step, value in zip(steps.tolist(), above.tolist(), strict=True)]
    back = [_place(x.at(step), y.at(value)) for step, value in zip(steps.tolist(), below.tolist(), strict=True)]
    return "M" + "L".join([*there, *reversed(back)]) + "Z"


def _place(x: float, y: float) -> str:
    return f"{round(SQUARE * x)} {round(SQUARE * (1 - y))}"


def _places(marks: Sequence[Mark], x: Scale) -> tuple[tuple[float, str], ...]:
    inside = [mark for mark in marks if x.low <= mark.step <= x.high]
    return tuple((100 * x.at(inside[at].step), inside[at].kind) for at in evenly(len(inside), _MOST_MARKS))


def _legend(lines: Sequence[Line], marks: Sequence[Mark]) -> tuple[Legend, ...]:
    shown = [Legend("area" if line.is_area else "line", line.style, line.name) for line in lines if not line.is_faint]
    shown += [Legend("faint", 0, "given up at a restart")] if any(line.is_faint for line in lines) else []
    names = {"save": "checkpoint saved", "restart": "restart"}
    return (
        *shown,
        *(Legend(kind, 0, names[kind]) for kind in ("save", "restart") if any(mark.kind == kind for mark in marks)),
    )


def _description(curves: Sequence[Curve], text: Callable[[float | None], str], marks: Sequence[Mark], y: Scale) -> str:
    """What a chart shows, for those who do not see it."""
    told = [
        f"{curve.name}: from {text(float(curve.known[0]))} to {text(float(curve.known[-1]))}, "
        f"lowest {text(_ends(curve.known)[0])}, highest {text(_ends(curve.known)[1])}"
        for curve in curves[:STYLES]
    ]
    first, last = _ends(curves[0].steps)
    more = f" and {len(curves) - STYLES} more lines" if len(curves) > STYLES else ""
    scale = " The vertical axis is logarithmic." if y.is_log else ""
    saves, restarts = (sum(mark.kind == kind for mark in marks) for kind in ("save", "restart"))
    marked = f" {saves} saved checkpoints and {restarts} restarts are marked." if marks else ""
    return f"Steps {first:,.0f} to {last:,.0f}. {'; '.join(told)}{more}.{scale}{marked}"


def _table(title: str, curves: Sequence[Curve], text: Callable[[float | None], str]) -> Table:
    longest = max(curves, key=lambda curve: len(curve.steps))
    chosen = [float(longest.steps[at]) for at in evenly(len(longest.steps), _ROWS)]
    rows = tuple((f"{step:,.0f}", *(text(curve.at(step)) for curve in curves)) for step in chosen)
    of = f", {len(chosen)} of {len(longest.steps):,} reported steps" if len(chosen) < len(longest.steps) else ""
    return Table(f"{title}{of}", ("step", *(curve.name for curve in curves)), rows)


def _fewer(steps: int, how: str) -> str:
    return f"{steps:,} reported steps in {BUCKETS} buckets: {how}."
