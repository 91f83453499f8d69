"""Every element of every parameter lies in exactly one place of the flat shards."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.original.zero_layout import Place, places_by_order, places_of_padded

NUMELS = st.lists(st.integers(0, 40), max_size=7)


def _collect(places: dict[str, list[Place]], shards: list[list[int]], name: str) -> list[int]:
    return [x for rank, start, numel in places[name] for x in shards[rank][start : start + numel]]


def _numbered(numels: list[int]) -> tuple[dict[str, int], dict[str, list[int]]]:
    starts = [sum(numels[:i]) for i in range(len(numels))]
    named = {f"p{i}": numel for i, numel in enumerate(numels)}
    return named, {f"p{i}": list(range(s, s + n)) for i, (s, n) in enumerate(zip(starts, numels, strict=True))}


@given(NUMELS, st.integers(1, 6), st.integers(1, 8))
def test_parameters_of_stages_1_and_2_are_found_by_order(numels: list[int], world_size: int, alignment: int) -> None:
    named, expected = _numbered(numels)
    paddings = [-numel % alignment for numel in numels]
    flat = [x for values, padding in zip(expected.values(), paddings, strict=True) for x in values + [-1] * padding]
    size = -(-len(flat) // (2 * world_size)) * 2
    shards = [flat[rank * size : (rank + 1) * size] for rank in range(world_size)]  # no padding at the end, as stored
    places = places_by_order(named, [len(shard) for shard in shards], paddings)
    assert {name: _collect(places, shards, name) for name in named} == expected


@given(NUMELS, st.integers(1, 6))
def test_parameters_of_stage_3_are_found_in_every_rank_s_shard(numels: list[int], world_size: int) -> None:
    named, expected = _numbered(numels)
    shards: list[list[int]] = [[] for _ in range(world_size)]
    for values in expected.values():
        piece = -(-len(values) // world_size)
        padded = values + [-1] * (piece * world_size - len(values))
        for rank in range(world_size):
            shards[rank] += padded[rank * piece : (rank + 1) * piece]
    places = places_of_padded(named, world_size)
    assert {name: _collect(places, shards, name) for name in named} == expected


def test_a_shard_that_ends_too_early_leaves_elements_out() -> None:
    assert places_by_order({"a": 5, "b": 5}, [4, 3]) == {"a": [Place(0, 0, 4), Place(1, 0, 1)], "b": [Place(1, 1, 2)]}
