"""Long versions of tests: the same tests over more cases, on request only.

DEEPSPEED_TEST_SWEEP=1 pytest tests/ranks/test_resume_matrix.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence

IS_SWEEP = os.environ.get("DEEPSPEED_TEST_SWEEP", "") not in ("", "0")
"""Whether the long versions were asked for."""


def covering_rows(*, strength: int) -> list[tuple[int, ...]]:
    """Choices of six values out of four, so few that cover so much: rows of linear codes over the field of four elements.

    Strength 2 gives 16 rows in which every two columns hold all 16 pairs, except that the last repeats the second.
    Strength 3 gives the 64 words of the hexacode, in which every three columns hold all 64 triples.
    """
    generators = {
        2: ((1, 1, 1, 0, 1, 1), (1, 0, 2, 1, 3, 0)),
        3: ((1, 0, 0, 1, 3, 2), (0, 1, 0, 1, 2, 3), (0, 0, 1, 1, 1, 1)),
    }[strength]
    rows: list[tuple[int, ...]] = [(0,) * 6]
    for generator in generators:
        rows = [_plus(row, [_times(factor, value) for value in generator]) for row in rows for factor in range(4)]
    return rows


def _plus(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a ^ b for a, b in zip(one, other, strict=True))


def _times(a: int, b: int) -> int:
    """Product in the field {0, 1, w, w + 1}, written 0 to 3, with w * w = w + 1."""
    return 0 if 0 in (a, b) else (a - 1 + b - 1) % 3 + 1
