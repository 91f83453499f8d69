"""Where a list of layers is cut into contiguous parts: pure arithmetic on weights, no torch.

    weights  204 168 168 168 0 204      2 parts     boundaries [0, 3, 6]
            |--- part 0 ---|- part 1 -|             part k has the layers boundaries[k] .. boundaries[k + 1] - 1

Lives here: the boundaries. Does not live here: what a layer weighs (`weights`), and which stage gets which part (`module`,
the caller). `deepspeed.runtime.utils` publishes the two functions.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from deepspeed.errors import ArgumentError, PipelineError

__all__ = ["matching_weights", "partition_balanced", "partition_uniform"]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Cut into parts of equal length; where it does not divide, the first parts have one more.

    Returns:
        `num_parts + 1` boundaries, from 0 to `num_items`.
    """
    _require_parts(num_parts)
    length, longer = divmod(num_items, num_parts)
    return [part * length + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cut so that the heaviest part is as light as possible and, among such cuts, the lightest as heavy as possible.

    No part is empty unless there are more parts than items. Among equal cuts the earlier parts get more items.

    Args:
        weights: of the items, none negative.
        num_parts: how many parts.

    Returns:
        `num_parts + 1` boundaries, from 0 to `len(weights)`.
    """
    _require_parts(num_parts)
    count = len(weights)
    if num_parts >= count:
        return [min(part, count) for part in range(num_parts + 1)]
    sums = [0, *accumulate(weights)]
    limit = _lightest_maximum(sums, num_parts)
    # best[k][start]: the lightest of k parts made of the items from `start` on, and the first of these parts' end
    best: list[list[tuple[float, int] | None]] = [[None] * count + [(float("inf"), count)]]
    for parts in range(1, num_parts + 1):
        row: list[tuple[float, int] | None] = [None] * (count + 1)
        for start in range(count - parts + 1):
            row[start] = _best_first_part(sums, limit, best[-1], start)
        best.append(row)
    boundaries = [0]
    for parts in range(num_parts, 0, -1):
        chosen = best[parts][boundaries[-1]]
        assert chosen is not None  # the limit is one that so many parts keep, and cutting a part further makes none heavier
        boundaries.append(chosen[1])
    return boundaries


def _best_first_part(
    sums: Sequence[float], limit: float, rest: Sequence[tuple[float, int] | None], start: int
) -> tuple[float, int] | None:
    """Choose where the part that begins at `start` ends, given the best for what comes after each end."""
    chosen: tuple[float, int] | None = None
    for stop in range(start + 1, len(sums)):
        weight = sums[stop] - sums[start]
        if weight > limit:
            break
        after = rest[stop]
        if after is not None and (chosen is None or min(weight, after[0]) >= chosen[0]):
            chosen = min(weight, after[0]), stop
    return chosen


def _lightest_maximum(sums: Sequence[float], num_parts: int) -> float:
    """Return the least weight that so many parts can keep.

    It is the weight of some range of items, at least the mean part and the heaviest item, and at most both together: filling
    parts up to the mean overshoots by less than an item. The margin is for sums of fractions.
    """
    mean, heaviest = sums[-1] / num_parts, max(later - earlier for earlier, later in pairwise(sums))
    least, most = max(mean, heaviest) * (1 - 1e-9), (mean + heaviest) * (1 + 1e-9)
    candidates = sorted(
        {
            stop - start
            for at, start in enumerate(sums)
            for stop in sums[max(at + 1, bisect_left(sums, start + least)) : bisect_right(sums, start + most)]
        }
    )
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _keeps(sums, num_parts, candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low]


def _keeps(sums: Sequence[float], num_parts: int, limit: float) -> bool:
    """Whether filling parts one after the other up to `limit` needs no more than `num_parts`."""
    start = parts = 0
    while start < len(sums) - 1:
        stop = start
        while stop + 1 < len(sums) and sums[stop + 1] - sums[start] <= limit:
            stop += 1
        if stop == start:
            return False
        start, parts = stop, parts + 1
    return parts <= num_parts


def matching_weights(pattern: str, class_names: Sequence[str]) -> list[float]:
    """Weigh 1 what has a class name in which `pattern`, a regular expression, is found in either case, and 0 the rest.

    Raises:
        PipelineError: nothing matches, or the pattern is no regular expression.
    """
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PipelineError(f"partition_method='type:{pattern}': no regular expression ({error}).") from error
    weights = [float(regex.search(name) is not None) for name in class_names]
    if not any(weights):
        known = ", ".join(sorted(set(class_names)))
        raise PipelineError(f"partition_method='type:{pattern}' matches no layer. The classes are: {known}.")
    return weights


def _require_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise ArgumentError(f"num_parts={num_parts}: at least one part is needed.")
