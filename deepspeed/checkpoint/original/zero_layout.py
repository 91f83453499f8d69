"""Where each parameter's elements lie in the flat shards of the original's ZeRO optimizers.

    stages 1 and 2   |p0      |p1    |p2|..|   the group, one parameter after another, padding at the end
                     |- rank 0 -|- rank 1 -|   cut into equal parts: a parameter may lie on several ranks

    stage 3          rank 0 |p0 |p1 |p2|       every parameter is padded to W x ceil(n / W) elements and cut by itself
                     rank 1 |p0.|p1 |p2|

Pure: no tensor is touched. Does not live here: our own layout (`sharding`), reading the files (`reading.slices`), writing
them (`writing.to_stages`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Place", "places_by_order", "places_of_padded", "shard_numel"]


class Place(NamedTuple):
    """Elements `[start, start + numel)` of `rank`'s flat shard, which continue the parameter where the last place ended."""

    rank: int
    start: int
    numel: int


def places_by_order(
    numels: Mapping[str, int], shard_numels: Sequence[int], paddings: Sequence[int] = ()
) -> dict[str, list[Place]]:
    """Places of stages 1 and 2: parameters in order, over shards of the numels given, one after another.

    Args:
        numels: name -> elements.
        shard_numels: elements of each rank's shard.
        paddings: elements between each parameter and the next (`parameter_alignment`); none if left out.
    """
    stops = list(accumulate(shard_numels))
    places: dict[str, list[Place]] = {}
    at = 0
    for number, (name, numel) in enumerate(numels.items()):
        found = places.setdefault(name, [])
        end = at + numel
        while at < end and at < (stops[-1] if stops else 0):
            rank = bisect_right(stops, at)
            start = at - (stops[rank] - shard_numels[rank])
            length = min(end, stops[rank]) - at
            found.append(Place(rank, start, length))
            at += length
        at = end + (paddings[number] if number < len(paddings) else 0)
    return places


def shard_numel(numel: int, world_size: int) -> int:
    """Elements of a parameter on each rank at stage 3, padding included."""
    return -(-numel // world_size)


def places_of_padded(numels: Mapping[str, int], world_size: int) -> dict[str, list[Place]]:
    """Places of stage 3: every parameter cut by itself, the pieces of each rank one after another."""
    places: dict[str, list[Place]] = {}
    start = 0
    for name, numel in numels.items():
        piece = shard_numel(numel, world_size)
        held = ((rank, min(piece, numel - rank * piece)) for rank in range(world_size))
        places[name] = [Place(rank, start, length) for rank, length in held if length > 0]
        start += piece
    return places
