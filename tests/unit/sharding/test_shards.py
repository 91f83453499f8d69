"""Shard space: which rank holds what, by property, by example, and at a thousand ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.sharding import FlatLayout, effective_bucket_numel

Parameters = list[tuple[int, int]]  # (elements, step of the unit number)

parameters = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1)), max_size=12)


def _units(given_parameters: Parameters) -> list[int]:
    return list(itertools.accumulate(step for _, step in given_parameters))


def _plan(given_parameters: Parameters, world_size: int, bucket_numel: int | None) -> FlatLayout:
    numels = [numel for numel, _ in given_parameters]
    if bucket_numel is None:
        units = _units(given_parameters)
        return FlatLayout.plan(numels, bucket_numel=1, alignment=3, world_size=world_size, units=units)
    return FlatLayout.plan(numels, bucket_numel=bucket_numel, alignment=3, world_size=world_size)


plans = st.builds(_plan, parameters, st.integers(1, 9), st.none() | st.integers(1, 90))


@given(plans)
def test_each_element_is_held_by_exactly_one_rank(layout: FlatLayout) -> None:
    held = [
        (f.index, f.param_start + e)
        for rank in range(layout.world_size)
        for f in layout.shard_fragments(rank)
        for e in range(f.numel)
    ]
    assert sorted(held) == sorted((slot.index, e) for slot in layout.slots for e in range(slot.numel))


@given(plans)
def test_fragments_of_one_rank_do_not_overlap_and_stay_inside_its_shards(layout: FlatLayout) -> None:
    for rank in range(layout.world_size):
        places = [f.buffer_start + e for f in layout.shard_fragments(rank) for e in range(f.numel)]
        assert places == sorted(set(places))
        assert all(0 <= place < layout.shard_numel for place in places)


@given(plans, st.data())
def test_fragments_of_a_part_of_shard_space_are_those_of_the_whole_cut_to_it(
    layout: FlatLayout, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, layout.shard_numel))
    stop = data.draw(st.integers(start, layout.shard_numel))
    for rank in range(layout.world_size):
        whole = {
            (f.index, f.param_start + e): f.buffer_start + e for f in layout.shard_fragments(rank) for e in range(f.numel)
        }
        part = {
            (f.index, f.param_start + e): f.buffer_start + e
            for f in layout.shard_fragments(rank, start, stop)
            for e in range(f.numel)
        }
        assert part == {key: place for key, place in whole.items() if start <= place < stop}


@given(plans)
def test_holders_of_a_parameter_and_fragments_of_the_ranks_say_the_same(layout: FlatLayout) -> None:
    by_rank = {(r, f) for r in range(layout.world_size) for f in layout.shard_fragments(r)}
    by_slot = [(rank, f) for number in range(len(layout.slots)) for rank, f in layout.holders(number)]
    assert set(by_slot) == by_rank
    assert len(by_slot) == len(by_rank)


@given(plans)
def test_shards_of_a_bucket_are_equal_and_tile_it(layout: FlatLayout) -> None:
    end = 0
    for bucket in layout.buckets:
        owned = [layout.owned(bucket, rank) for rank in range(layout.world_size)]
        begin, stop = layout.shard_range(bucket)
        assert [start for start, _ in owned] == [bucket.start, *[last for _, last in owned[:-1]]]
        assert owned[-1][1] == bucket.stop
        assert {last - first for first, last in owned} == {stop - begin}
        assert begin == end
        end = stop
    assert end == layout.shard_numel


@given(parameters, st.integers(1, 9))
def test_a_bucket_is_a_run_of_parameters_of_one_unit(given_parameters: Parameters, world_size: int) -> None:
    layout = _plan(given_parameters, world_size, None)
    units = _units(given_parameters)
    found = [{units[s.index] for s in layout.slots[b.first_slot : b.last_slot]} for b in layout.buckets]
    assert [len(each) for each in found] == [1] * len(set(units))
    assert [next(iter(each)) for each in found] == sorted(set(units), reverse=True)


@given(plans)
def test_a_slot_knows_its_bucket(layout: FlatLayout) -> None:
    for bucket in layout.buckets:
        assert all(layout.bucket_of(number) == bucket for number in range(bucket.first_slot, bucket.last_slot))


def test_a_thousand_ranks_share_a_large_model_evenly_without_a_list_per_rank() -> None:
    block = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    numels = [32000 * 4096, *block * 32, 4096, 32000 * 4096]
    units = [0, *[1 + n // len(block) for n in range(len(block) * 32)], 33, 34]
    layout = FlatLayout.plan(numels, bucket_numel=1, alignment=32, world_size=1024, units=units)
    assert len(layout.buckets) == 35
    assert layout.shard_numel * 1024 - sum(numels) <= 35 * 32 * 1024
    for rank in (0, 511):  # padding lies with the last ranks
        assert layout.shard_numel - sum(f.numel for f in layout.shard_fragments(rank)) <= 32
    table = len(layout.slots) - 1
    assert [rank for rank, _ in layout.holders(table)] == list(range(1024))
    assert sum(f.numel for _, f in layout.holders(table)) == numels[0]


def test_ranks_without_any_element_of_a_tiny_model_hold_padding() -> None:
    layout = FlatLayout.plan([5], bucket_numel=100, alignment=4, world_size=4)
    assert layout.shard_numel == 4
    assert [[f.numel for f in layout.shard_fragments(rank)] for rank in range(4)] == [[4], [1], [], []]


def test_units_must_be_one_number_per_parameter() -> None:
    with pytest.raises(ArgumentError, match="1 unit numbers for 2 parameters"):
        FlatLayout.plan([1, 2], bucket_numel=1, units=[0])


@pytest.mark.parametrize(
    ("total", "at_most", "expected"),
    [(1000, 5 * 10**8, 1 << 20), (1000, 50, 50), (1 << 30, 5 * 10**8, 1 << 26), (1 << 40, 5 * 10**8, 5 * 10**8)],
)
def test_a_bucket_is_a_sixteenth_of_the_model_within_the_configured_limit(total: int, at_most: int, expected: int) -> None:
    assert effective_bucket_numel([total // 2, total - total // 2], at_most) == expected
