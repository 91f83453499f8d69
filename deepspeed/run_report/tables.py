"""Tables as texts, which a template draws. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bar", "Table", "bar_table"]


@dataclass(frozen=True)
class Bar:
    """A cell with a bar in it: its length in percent of the longest, and its text."""

    percent: float
    label: str
    style: int = 0


@dataclass(frozen=True)
class Table:
    """Cells as they are written. The first column names its row; the others stand right if `is_numeric`."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | Bar, ...], ...]
    is_numeric: bool = True
    note: str = ""
    is_wide: bool = False
    """It takes the whole width of its section."""

    @property
    def bars(self) -> frozenset[str]:
        """Heads of the columns that have bars."""
        return frozenset(
            head for head, cell in zip(self.head, self.rows[0] if self.rows else (), strict=False) if isinstance(cell, Bar)
        )


def bar_table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[tuple[str, float, str, tuple[str, ...]]],
    *,
    styled: bool = False,
    note: str = "",
) -> Table:
    """Rows of a name, a length, the text of that length and further cells.

    Args:
        caption: of the table.
        head: of its columns: name, bar, further ones.
        rows: name, length >= 0, its text, further cells.
        styled: each row's bar has the colour of its place, as the lines of a chart have.
        note: what the table leaves out.
    """
    longest = max((length for _, length, _, _ in rows), default=0.0) or 1.0
    cells: list[tuple[str | Bar, ...]] = [
        (name, Bar(100 * length / longest, label, at % 8 if styled else 0), *others)
        for at, (name, length, label, others) in enumerate(rows)
    ]
    return Table(caption, tuple(head), tuple(cells), note=note)
