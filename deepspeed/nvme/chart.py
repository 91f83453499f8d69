"""Bars as an SVG picture, without a plotting library. Pure. Called by the commands of this room."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Bar", "bars_svg"]

_LABEL_WIDTH, _BAR_WIDTH, _VALUE_WIDTH, _ROW_HEIGHT, _TOP = 260, 420, 120, 26, 64
_COLORS = {False: "#2a6f97", True: "#bcccdc"}


class Bar(NamedTuple):
    """One row."""

    label: str
    value: float
    is_faint: bool = False


def bars_svg(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """Return the text of an SVG file: horizontal bars from zero, each with its value.

    Args:
        title: above the picture.
        unit: of the values.
        bars: from the top down; values at least 0.
    """
    longest = max((bar.value for bar in bars), default=0.0) or 1.0
    width = _LABEL_WIDTH + _BAR_WIDTH + _VALUE_WIDTH
    height = _TOP + _ROW_HEIGHT * len(bars) + 16
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" fill="#1b1b1b">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_LABEL_WIDTH}" y="50" fill="#5a5a5a">{escape(unit)}</text>',
    ]
    for number, bar in enumerate(bars):
        top = _TOP + number * _ROW_HEIGHT
        length = bar.value / longest * _BAR_WIDTH
        rows += [
            f'<text x="{_LABEL_WIDTH - 10}" y="{top + 14}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{_LABEL_WIDTH}" y="{top}" width="{length:.1f}" height="18" fill="{_COLORS[bar.is_faint]}"/>',
            f'<text x="{_LABEL_WIDTH + length + 8:.1f}" y="{top + 14}">{bar.value:.3g}</text>',
        ]
    return "\n".join([*rows, "</svg>", ""])
