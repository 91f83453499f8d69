"""Timelines of pipelines as text and as pictures.

    stage 0  F0 F1 .  .  B0--- F2 B1--- .  B2---   a column is a unit of time; dashes go on with the work before them,
    stage 1  .  F0 B0--- F1 B1--- F2 B2---         dots wait

Lives here: drawing. Does not live here: what is drawn (`timeline`), and the command (`command`, the caller).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from deepspeed.common.plotting import new_figure
from deepspeed.pipe.orders import Work
from deepspeed.pipe.timeline import Span, Timeline

__all__ = ["save_png", "text_lines"]

_MOST_COLUMNS = 120
_COLOURS = {"F": "#4c78a8", "B": "#59a14f", "W": "#edc948"}


def text_lines(timeline: Timeline) -> list[str]:
    """Draw a timeline, one line per stage. Works of chunk c > 0 are shown as `F3.c`.

    A column is the longest time that all starts and ends are multiples of or, where that would make too many, a share of the
    whole; then works are drawn from the column that they start nearest to.
    """
    edges = sorted({edge for stage in timeline.spans for span in stage for edge in (span.start, span.end)})
    unit = _unit(edges, timeline.makespan)
    width = 1 + max(len(str(span.work)) for stage in timeline.spans for span in stage)
    label = len(f"stage {len(timeline.spans) - 1}")
    return [f"{f'stage {at}':<{label}}  {_row(stage, unit, width)}".rstrip() for at, stage in enumerate(timeline.spans)]


def _unit(edges: Sequence[float], makespan: float) -> float:
    """Return the duration of a column: a divisor of all edges, tried from the shortest distance between two down."""
    shortest = min(later - earlier for earlier, later in pairwise(edges) if later - earlier > 1e-9)
    for parts in range(1, 11):
        unit = shortest / parts
        if makespan / unit <= _MOST_COLUMNS and all(abs(edge / unit - round(edge / unit)) < 1e-6 for edge in edges):
            return unit
    return makespan / _MOST_COLUMNS


def _row(spans: Sequence[Span], unit: float, width: int) -> str:
    row, column = "", 0
    for work, start, end in spans:
        first = max(column, round(start / unit))
        row += f"{'.':<{width}}" * (first - column)
        column = max(first + 1, round(end / unit))
        filler = " " if column == first + 1 else "-"
        row += f"{str(work).ljust((column - first) * width - 1, filler)} "
    return row


def save_png(timeline: Timeline, title: str, path: Path) -> None:
    """Draw a timeline into a file: a row per stage, a colour per kind of work, later chunks paler.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    stages, works = len(timeline.spans), [span.work for stage in timeline.spans for span in stage]
    chunks = 1 + max(work.chunk for work in works)
    width = max(7.0, min(20.0, 0.34 * len(timeline.spans[0]) + 2))
    figure = new_figure(width, 1.3 + 0.36 * stages, asked_by="--png")
    axes = figure.subplots()
    labels: dict[str, object] = {}
    for row, stage in enumerate(timeline.spans):
        for work, start, end in stage:
            alpha = 1 - 0.6 * work.chunk / chunks
            style = {"color": _COLOURS[work.kind], "edgecolor": "white", "linewidth": 0.8}
            drawn = axes.barh(row, end - start, left=start, height=0.84, alpha=alpha, **style)
            if work.chunk == 0:
                labels.setdefault(_meaning(work.kind, works), drawn)
            axes.text((start + end) / 2, row, str(work.micro_batch), ha="center", va="center", fontsize=8)
    axes.set(yticks=range(stages), yticklabels=[f"stage {stage}" for stage in range(stages)], xlabel="time")
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(labels.values(), labels.keys(), loc="outside upper right", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _meaning(kind: str, works: Sequence[Work]) -> str:
    if kind == "B":
        return "gradients of inputs" if any(work.kind == "W" for work in works) else "backward"
    return {"F": "forward", "W": "gradients of weights"}[kind]
