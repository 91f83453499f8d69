"""Positions that ranks read of one global order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.data.order import rank_positions

LENGTHS = st.integers(1, 40)
WORLDS = st.integers(1, 9)


def read(length: int, start: int, world_size: int) -> list[list[int]]:
    return [rank_positions(length, start, world_size, rank) for rank in range(world_size)]


@given(length=LENGTHS, world_size=WORLDS)
def test_every_position_is_read_and_only_the_first_ones_twice(length: int, world_size: int) -> None:
    ranks = read(length, 0, world_size)
    assert len({len(positions) for positions in ranks}) == 1
    everything = sorted(position for positions in ranks for position in positions)
    padding = len(everything) - length
    assert 0 <= padding < world_size
    assert everything == sorted([*range(length), *(i % length for i in range(padding))])


@given(length=LENGTHS, world_size=WORLDS, steps=st.integers(0, 10))
def test_after_k_samples_each_the_ranks_have_read_a_prefix(length: int, world_size: int, steps: int) -> None:
    done = sorted(p for positions in read(length, 0, world_size) for p in positions[:steps])
    reached = min(steps * world_size, length)
    assert sorted(set(done)) == list(range(reached))


@given(length=LENGTHS, first=WORLDS, second=WORLDS, steps=st.integers(0, 10))
def test_another_world_size_reads_exactly_the_rest(length: int, first: int, second: int, steps: int) -> None:
    start = steps * first
    rest = {p for positions in read(length, start, second) for p in positions[: max(length - start, 0)]}
    assert rest >= set(range(start, length))
    in_order = [p for group in zip(*read(length, start, second), strict=True) for p in group]
    assert in_order[: max(length - start, 0)] == list(range(start, length))


@given(length=LENGTHS, beyond=st.integers(0, 20), world_size=WORLDS)
def test_nothing_is_left_at_or_behind_the_end(length: int, beyond: int, world_size: int) -> None:
    assert read(length, length + beyond, world_size) == [[]] * world_size
