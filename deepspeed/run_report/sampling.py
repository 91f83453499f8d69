"""Fewer points with the same outline. Pure.

    10,000 steps -> buckets of neighbours -> of each the lowest and the highest, in the order they came

A spike of one step stays visible. Called by `charts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from deepspeed.run_report.columns import Numbers

__all__ = ["averaged", "evenly", "outline"]


def outline(values: Numbers, buckets: int) -> list[int]:
    """Which values to draw: of each bucket the lowest and highest, with the first and the last of all.

    A bucket in which some value is not known (nan) keeps one such place too, so that a line breaks there. At most
    3 * buckets + 2 places, ascending; all where there are no more than 2 * buckets.
    """
    if len(values) <= 2 * buckets:
        return list(range(len(values)))
    chosen = {0, len(values) - 1}
    for begin, end in _bounds(len(values), buckets):
        bucket = values[begin:end]
        unknown = np.isnan(bucket)
        if not unknown.all():
            chosen |= {begin + int(np.nanargmin(bucket)), begin + int(np.nanargmax(bucket))}
        if unknown.any():
            chosen.add(begin + int(unknown.argmax()))
    return sorted(chosen)


def averaged(values: Numbers | Sequence[float], buckets: int) -> Numbers:
    """The mean of each bucket; the values themselves where there are no more than `buckets`."""
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) <= buckets:
        return numbers
    begins = np.array([begin for begin, _ in _bounds(len(numbers), buckets)])
    counts = np.diff(np.append(begins, len(numbers)))
    return np.asarray(np.add.reduceat(numbers / np.repeat(counts, counts), begins))


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, spread evenly, with the first and the last."""
    if count <= most or most < 2:
        return list(range(count))[: max(most, 0)]
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def _bounds(count: int, buckets: int) -> list[tuple[int, int]]:
    """Begin and end of each of `buckets` <= count parts that cover all places once."""
    edges = [at * count // buckets for at in range(buckets + 1)]
    return list(itertools.pairwise(edges))
