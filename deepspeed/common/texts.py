"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned"]

_GAP = "  "


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return each row as one line whose columns are as wide as their widest cell.

    Args:
        rows: cells, as many in each row as there are sides.
        sides: of each column `l` or `r`, where its cells stand.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(sides))] if rows else []
    placed = [
        [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ]
        for row in rows
    ]
    return [_GAP.join(cells).rstrip() for cells in placed]
