"""The plan as a person reads it in a terminal: one setting's terms with bars, then all settings side by side.

Called by `command`; `page` shows the same rows. Does not live here: numbers (`comparison`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table

from deepspeed.planning.comparison import Comparison
from deepspeed.planning.terms import RankPlan, Term, Tier
from deepspeed.planning.traffic import transfer_seconds

__all__ = ["Sides", "amount", "render", "sentences", "show", "where"]

_BAR = 24
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_MOMENTS = {"always": "", "pass": "during forward and backward", "update": "during the update"}


def amount(nbytes: float) -> str:
    """Bytes with three digits: `13.0 GB`, of 1e9 bytes."""
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes / size >= 100 else f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def show(comparison: Comparison, console: Console, bandwidth: float | None = None) -> None:
    """Print it.

    Args:
        comparison: what to print.
        console: where.
        bandwidth: GB/s that a rank sends at; None: no times.
    """
    console.print(render(comparison, bandwidth))


def render(comparison: Comparison, bandwidth: float | None = None) -> RenderableType:
    """The tables and sentences."""
    head = f"{comparison.subject}: {comparison.numel:,} parameters on {comparison.ranks} rank(s); figures are per rank."
    parts: list[RenderableType] = [head, "", _terms(comparison.asked), "", _sides(comparison, bandwidth)]
    parts += ["", *sentences(comparison)]
    return Group(*parts)


def _terms(plan: RankPlan) -> Table:
    table = Table(title=f"{plan.label}: at most {amount(plan.peak_nbytes())} on the device", title_justify="left", box=None)
    for column, justify in (("what", "left"), ("bytes", "right"), ("", "left"), ("where", "left"), ("lowered by", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    largest = max((term.nbytes for term in plan.terms), default=1)
    for term in sorted(plan.terms, key=lambda each: -each.nbytes):
        bar = "#" * max(1, round(_BAR * term.nbytes / largest))
        table.add_row(term.name, amount(term.nbytes), bar, where(term), term.lower)
    return table


def where(term: Term) -> str:
    """Tier and moment."""
    return ", ".join(each for each in (term.tier, _MOMENTS[term.moment]) if each)


@dataclass(frozen=True)
class Sides:
    """The table of all settings, the one that was asked for first."""

    columns: list[str]
    plans: tuple[RankPlan, ...]
    rows: list[list[str]]

    @classmethod
    def of(cls, comparison: Comparison, bandwidth: float | None) -> Sides:
        """As texts."""
        tiers: tuple[Tier, ...] = ("device", "host", "nvme")
        plans = (comparison.asked, *comparison.others)
        used = [tier for tier in tiers if any(each.peak_nbytes(tier) for each in plans)]
        size = comparison.device_nbytes
        columns = ["setting", *used, "sent per step", *["seconds"] * bool(bandwidth), *["fits"] * (size is not None)]
        rows = []
        for plan in plans:
            row = [plan.label, *(amount(plan.peak_nbytes(tier)) for tier in used), amount(plan.sent_nbytes)]
            row += [f"{transfer_seconds(plan.sent_nbytes, bandwidth):.3f}"] if bandwidth else []
            row += [] if size is None else ["yes" if plan.fits(size) else "no"]
            rows.append(row)
        return cls(columns, plans, rows)


def _sides(comparison: Comparison, bandwidth: float | None) -> Table:
    sides = Sides.of(comparison, bandwidth)
    table = Table(title="Side by side", title_justify="left", box=None)
    for name in sides.columns:
        table.add_column(name, justify="left" if name in ("setting", "fits") else "right")
    for row in sides.rows:
        table.add_row(*row)
    return table


def sentences(comparison: Comparison) -> list[str]:
    """What the tables do not say."""
    lines = list(comparison.notes)
    if comparison.stages:
        peaks = ", ".join(amount(stage.peak_nbytes()) for stage in comparison.stages)
        lines.append(f"Stages of the pipeline, the first one first, take at most {peaks}; the tables show the fullest.")
    if comparison.recomputed_nbytes is not None:
        lines.append(f"With every block recomputed, activations are {amount(comparison.recomputed_nbytes)}.")
    if comparison.device_nbytes is None:
        return lines
    fitting = comparison.lowest_that_fits()
    size = amount(comparison.device_nbytes)
    if fitting is None:
        advice = (f"  {each}" for each in comparison.asked.advice())
        return [*lines, f"Nothing here fits {size}. The largest terms first:", *advice]
    spare = amount(comparison.device_nbytes - fitting.peak_nbytes())
    return [*lines, f"The first that fits {size}: {fitting.label}, with {spare} to spare."]
