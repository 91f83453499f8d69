"""Fewer points with the same outline. Pure.

    10,000 steps -> buckets of neighbours -> of each the lowest and the highest, in the order they came

A spike of one step stays visible. Called by `charts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["averaged", "evenly", "outline"]


def outline(values: Sequence[float | None], buckets: int) -> list[int]:
    """Which values to draw: of each bucket the lowest and highest, with the first and the last of all.

    A bucket in which some value is not known keeps one such place too, so that a line breaks there. At most
    3 * buckets + 2 places, ascending; all where there are no more than 2 * buckets.
    """
    if len(values) <= 2 * buckets:
        return list(range(len(values)))
    chosen = {0, len(values) - 1}
    for begin, end in _bounds(len(values), buckets):
        known = [(value, at) for at in range(begin, end) if (value := values[at]) is not None]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
        if len(known) < end - begin:
            chosen.add(next(at for at in range(begin, end) if values[at] is None))
    return sorted(chosen)


def averaged(values: Sequence[float], buckets: int) -> list[float]:
    """The mean of each bucket; the values themselves where there are no more than `buckets`."""
    if len(values) <= buckets:
        return list(values)
    return [sum(values[begin:end]) / (end - begin) for begin, end in _bounds(len(values), buckets)]


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, spread evenly, with the first and the last."""
    if count <= most or most < 2:
        return list(range(count))[: max(most, 0)]
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def _bounds(count: int, buckets: int) -> list[tuple[int, int]]:
    """Begin and end of each of `buckets` <= count parts that cover all places once."""
    edges = [at * count // buckets for at in range(buckets + 1)]
    return list(itertools.pairwise(edges))
