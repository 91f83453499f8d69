"""Words that error texts and tables share.

Called wherever a text names things of which there may be many.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["some"]


def some(texts: Sequence[str], most: int, nothing: str = "none") -> str:
    """The first `most` of some texts, and how many more there are; `nothing` where there is none."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return (", ".join(texts[:most]) or nothing) + more
