"""Numbers as a person reads them, the same on the page and in the terminal. Pure.

1234567 -> 1.23 M      0.0041 s -> 4.10 ms      5400 s -> 1 h 30 min      1.3e10 bytes -> 13.0 GB      not finite -> -
"""

from __future__ import annotations

import math
from datetime import datetime, timezone

__all__ = ["UNKNOWN", "clock", "count", "duration", "nbytes", "number", "seconds", "share"]

UNKNOWN = "-"
_LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def number(value: float | None, digits: int = 4) -> str:
    """A value without unit, such as a loss: `2.347`, `0.0003`, `1.2e-07`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0 or 1e-4 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.{min(digits, 3)}g}"


def count(value: float | None, unit: str = "") -> str:
    """How many, in three digits: `124 M`, `312 TFLOPS` with the unit "FLOPS"."""
    return UNKNOWN if value is None or not math.isfinite(value) else _scaled(value, unit)


def nbytes(value: float | None) -> str:
    """Bytes of 1000: `13.0 GB`."""
    return UNKNOWN if value is None or not math.isfinite(value) else _scaled(value, "B")


def seconds(value: float | None) -> str:
    """A short time: `231 ms`, `1.52 s`; from two minutes on as `duration`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value >= 120:
        return duration(value)
    for size, unit in _SMALL:
        if abs(value) >= size * 0.9995 or (unit == "us" and value):
            return f"{_three(value / size)} {unit}"
    return "0 s"


def duration(value: float | None) -> str:
    """A long time: `45 s`, `12 min 5 s`, `1 h 30 min`, `3 d 4 h`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value >= 1e12:  # no time of a run
        return f"{value:.3g} s"
    whole = max(0, round(value))
    parts = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        amount, whole = divmod(whole, size)
        if amount:
            parts.append(f"{amount} {unit}")
        elif parts:  # no `1 d 5 s`
            break
    return " ".join(parts[:2]) or "0 s"


def share(value: float | None) -> str:
    """A part of one: `41.2 %`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{_three(100 * value) if value else 0} %"


def clock(time: float | None) -> str:
    """A moment in UTC: `2026-12-01 08:45:22`."""
    if time is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # no date of the calendar
        return number(time)


def _scaled(value: float, unit: str) -> str:
    for size, prefix in _LARGE:
        if abs(value) >= size * 0.9995:
            return f"{_three(value / size)} {prefix}{unit}"
    return f"{_three(value) if value != round(value) else round(value)} {unit}".rstrip()


def _three(value: float) -> str:
    """Three digits, without an exponent below 1e6."""
    if value == 0 or not abs(value) < 1e6:  # infinite and NaN, too
        return f"{value:.3g}"
    rounded = float(f"{value:.3g}")  # 0.9996 has the decimals of 1.00
    decimals = 2 - math.floor(math.log10(abs(rounded)) + 1e-9) if rounded else 0
    return f"{rounded:.{min(max(decimals, 0), 6)}f}"
