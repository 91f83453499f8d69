"""The plan as a person reads it in a terminal: one setting's terms with bars, then all settings side by side.

Called by `command`. Does not live here: numbers (`comparison`).
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.table import Table

from deepspeed.planning.comparison import Comparison
from deepspeed.planning.terms import RankPlan, Tier
from deepspeed.planning.traffic import transfer_seconds

__all__ = ["amount", "render", "show"]

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
    parts += ["", *_sentences(comparison)]
    return Group(*parts)


def _terms(plan: RankPlan) -> Table:
    table = Table(title=f"{plan.label}: at most {amount(plan.peak_nbytes())} on the device", title_justify="left", box=None)
    for column, justify in (("what", "left"), ("bytes", "right"), ("", "left"), ("where", "left"), ("lowered by", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    largest = max((term.nbytes for term in plan.terms), default=1)
    for term in sorted(plan.terms, key=lambda each: -each.nbytes):
        where = ", ".join(each for each in (term.tier, _MOMENTS[term.moment]) if each)
        bar = "#" * max(1, round(_BAR * term.nbytes / largest))
        table.add_row(term.name, amount(term.nbytes), bar, where, term.lower)
    return table


def _sides(comparison: Comparison, bandwidth: float | None) -> Table:
    table = Table(title="Side by side", title_justify="left", box=None)
    tiers: tuple[Tier, ...] = ("device", "host", "nvme")
    used = [tier for tier in tiers if any(each.peak_nbytes(tier) for each in (comparison.asked, *comparison.others))]
    columns = ["setting", *used, "sent per step", *(["seconds"] if bandwidth else []), *_fits_column(comparison)]
    for name in columns:
        table.add_column(name, justify="left" if name in ("setting", "fits") else "right")
    for plan in (comparison.asked, *comparison.others):
        row = [plan.label, *(amount(plan.peak_nbytes(tier)) for tier in used), amount(plan.sent_nbytes)]
        row += [f"{transfer_seconds(plan.sent_nbytes, bandwidth):.3f}"] if bandwidth else []
        row += [] if comparison.device_nbytes is None else ["yes" if plan.fits(comparison.device_nbytes) else "no"]
        table.add_row(*row)
    return table


def _fits_column(comparison: Comparison) -> list[str]:
    return [] if comparison.device_nbytes is None else ["fits"]


def _sentences(comparison: Comparison) -> list[str]:
    lines = list(comparison.notes)
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
