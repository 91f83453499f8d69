"""Byte counts as people read them.

What does not live here: asking a device or the host how much memory is in use (`accelerator.memory`).
"""

from __future__ import annotations

__all__ = ["format_nbytes"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def format_nbytes(nbytes: int) -> str:
    """Return `nbytes` with a binary unit and two decimals: `0 B`, `1023 B`, `1.50 KiB`, `-2.00 GiB`."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    # 0.005 less than a whole step up would print as 1024.00
    power = next((p for p in range(1, len(_UNITS)) if abs(nbytes) < (1024 - 0.005) * 1024**p), len(_UNITS))
    return f"{nbytes / 1024**power:.2f} {_UNITS[power - 1]}"
