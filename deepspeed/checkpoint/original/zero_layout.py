"""Where each parameter's elements lie in the flat shards of the original's ZeRO optimizers.

    stages 1 and 2   |p0      |p1    |p2|..|   the group, one parameter after another, padding at the end
                     |- rank 0 -|- rank 1 -|   cut into equal parts: a parameter may lie on several ranks

    stage 3          rank 0 |p0 |p1 |p2|       every parameter is padded to W x ceil(n / W) elements and cut by itself
                     rank 1 |p0.|p1 |p2|

Pure: no tensor is touched. Does not live here: our own layout (`sharding`), reading the files (`slices`), writing them
(`to_stages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Place", "places_by_mapping", "places_by_order", "places_of_padded", "shard_numel"]


class Place(NamedTuple):
    """Elements `[start, start + numel)` of `rank`'s flat shard, which continue the parameter where the last place ended."""

    rank: int
    start: int
    numel: int


def places_by_mapping(mappings: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, list[Place]]:
    """Places as the shards state them, stages 1 and 2: for each rank name -> (start, numel)."""
    places: dict[str, list[Place]] = {}
    for rank, mapping in enumerate(mappings):
        for name, (start, numel) in mapping.items():
            places.setdefault(name, []).append(Place(rank, start, numel))
    return places


def places_by_order(numels: Mapping[str, int], shard_numels: Sequence[int]) -> dict[str, list[Place]]:
    """Places of stages 1 and 2 by arithmetic: parameters in order, over shards of the numels given, one after another."""
    places: dict[str, list[Place]] = {}
    rank = start = 0
    for name, numel in numels.items():
        found = places.setdefault(name, [])
        missing = numel
        while missing and rank < len(shard_numels):
            length = min(missing, shard_numels[rank] - start)
            if length:
                found.append(Place(rank, start, length))
            missing, start = missing - length, start + length
            if missing:
                rank, start = rank + 1, 0
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
