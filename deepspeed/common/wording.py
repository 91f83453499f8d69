"""Words that error texts and tables share.

Called wherever a text names things of which there may be many.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["some"]


def some(texts: Sequence[str], most: int, nothing: str = "none", *, between: str = ", ", count: int | None = None) -> str:
    """The first `most` of some texts, and how many more there are; `nothing` where there is none.

    Args:
        texts: all of them, or at least the first `most`.
        most: how many are shown.
        nothing: said where there is none.
        between: what stands between two; another than a comma where texts have commas of their own.
        count: how many there are; None: as many as `texts`.
    """
    left = (len(texts) if count is None else count) - most
    return (between.join(texts[:most]) or nothing) + (f" and {left} more" if left > 0 else "")
