"""Ranges of a file: nobody shares bytes, and what is given back is used again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.activations.file_space import FileSpace


def test_the_smallest_range_that_fits_is_taken() -> None:
    space = FileSpace()
    large, fence, small, end = (space.take(nbytes) for nbytes in (8, 1, 4, 1))
    space.give_back(large, 8)
    space.give_back(small, 4)
    assert space.take(3) == small
    assert space.take(5) == large
    assert (fence, end, space.end) == (8, 13, 14)


def test_neighbours_are_joined_from_both_sides() -> None:
    space = FileSpace()
    begins = [space.take(2) for _ in range(4)]
    for begin in (begins[0], begins[2], begins[1]):
        space.give_back(begin, 2)
    assert space.take(6) == 0


def test_a_free_range_at_the_end_is_made_longer() -> None:
    space = FileSpace()
    space.give_back(space.take(4), 4)
    assert space.take(6) == 0
    assert space.end == 6


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40))
def test_no_two_owners_share_a_byte_and_no_byte_is_lost(steps: list[tuple[int, int]]) -> None:
    space, taken = FileSpace(), []
    for nbytes, give_back in steps:
        taken.append((space.take(nbytes), nbytes))
        for _ in range(min(give_back, len(taken)) if give_back < 3 else 0):
            space.give_back(*taken.pop(nbytes % len(taken)))
        owned = [byte for begin, size in taken for byte in range(begin, begin + size)]
        assert len(owned) == len(set(owned))
        assert len(owned) + space.free_nbytes == space.end


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(2, 4))
def test_the_same_steps_again_need_no_longer_file(sizes: list[int], rounds: int) -> None:
    space, ends = FileSpace(), []
    for _ in range(rounds):
        taken = [(space.take(nbytes), nbytes) for nbytes in sizes]
        for each in reversed(taken):
            space.give_back(*each)
        ends.append(space.end)
    assert ends == [sum(sizes)] * rounds
