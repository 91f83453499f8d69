"""The formula of memory: by hand on small numbers, and what must hold for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.activations.needs import SegmentBytes, activation_needs
from deepspeed.errors import ArgumentError

SEGMENTS = st.lists(st.builds(SegmentBytes, st.integers(0, 1000), st.integers(0, 10_000)), max_size=8)


def test_equal_segments_by_hand() -> None:
    needs = activation_needs([SegmentBytes(10, 100)] * 4)
    assert needs.without_nbytes == 4 * 110
    assert needs.kept_nbytes == 4 * 10
    assert needs.peak_nbytes == 4 * 10 + 100  # the last segment's backward: all inputs, and what it computed again
    assert needs.away_nbytes == 0


def test_shards_are_rounded_up_and_the_last_input_is_whole() -> None:
    needs = activation_needs([SegmentBytes(10, 100)] * 4, tensor_ranks=3)
    assert needs.kept_nbytes == 3 * 4 + 10
    assert needs.peak_nbytes == 3 * 4 + 10 + 100


def test_moved_inputs_leave_the_last_one_and_those_on_their_way_back() -> None:
    needs = activation_needs([SegmentBytes(10, 100)] * 4, is_moved=True, segments_ahead=2)
    assert needs.kept_nbytes == 10
    assert needs.away_nbytes == 3 * 10
    assert needs.peak_nbytes == 2 * 10 + 10 + 100


def test_a_large_first_segment_may_be_the_peak() -> None:
    assert activation_needs([SegmentBytes(1, 1000), SegmentBytes(50, 10)]).peak_nbytes == 1001


@given(SEGMENTS)
def test_checkpointing_keeps_no_more_than_going_without(segments: list[SegmentBytes]) -> None:
    needs = activation_needs(segments)
    assert needs.kept_nbytes <= needs.peak_nbytes <= needs.without_nbytes


@given(SEGMENTS, st.integers(1, 8), st.booleans(), st.integers(0, 3))
def test_more_ranks_and_moving_never_need_more(
    segments: list[SegmentBytes], ranks: int, is_moved: bool, segments_ahead: int
) -> None:
    plain = activation_needs(segments)
    needs = activation_needs(segments, tensor_ranks=ranks, is_moved=is_moved, segments_ahead=segments_ahead)
    assert needs.kept_nbytes <= plain.kept_nbytes
    assert needs.peak_nbytes <= plain.peak_nbytes
    assert needs.kept_nbytes + needs.away_nbytes <= plain.kept_nbytes


@pytest.mark.parametrize(
    ("segment", "keys"),
    [
        (SegmentBytes(-1, 0), {}),
        (SegmentBytes(0, -1), {}),
        (SegmentBytes(1, 1), {"tensor_ranks": 0}),
        (SegmentBytes(1, 1), {"segments_ahead": -1}),
    ],
)
def test_impossible_numbers_are_refused(segment: SegmentBytes, keys: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="at least"):
        activation_needs([segment], **keys)
