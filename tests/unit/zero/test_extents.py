from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.sharding import FlatLayout
from deepspeed.zero.extents import Extent, extents_of


def _layout(numels: list[int], world_size: int) -> FlatLayout:
    return FlatLayout.plan(numels, bucket_numel=1, alignment=2, world_size=world_size, units=list(range(len(numels))))


def test_shards_in_memory_are_one_extent() -> None:
    assert extents_of(_layout([4, 4, 4], 2), 1, is_sharded=True) == (Extent(0, 6, 0),)


def test_whole_parameters_have_an_extent_per_bucket() -> None:
    extents = extents_of(_layout([4, 4], 2), 1, is_sharded=False)
    assert extents == (Extent(0, 2, 2), Extent(2, 4, 4))  # the second half of each bucket of 4


def test_what_is_away_has_an_extent_per_bucket_and_the_rest_moves_together() -> None:
    extents = extents_of(_layout([4, 4, 4, 4, 4], 2), 0, is_sharded=True, away={1, 2})
    assert extents == (Extent(0, 2, 0), Extent(2, 4, 0, 1), Extent(4, 6, 0, 2), Extent(6, 10, -4))


@given(numels=st.lists(st.integers(0, 20), max_size=8), world_size=st.integers(1, 4), data=st.data())
def test_extents_cover_shard_space_once_and_values_without_gaps(
    numels: list[int], world_size: int, data: st.DataObject
) -> None:
    layout = _layout(numels, world_size)
    full = [n for n, bucket in enumerate(layout.buckets) if bucket.stop > bucket.start]
    away = data.draw(st.sets(st.sampled_from(full))) if full else set()
    extents = extents_of(layout, 0, is_sharded=True, away=away)
    assert [e for x in extents for e in range(x.start, x.stop)] == list(range(layout.shard_numel))
    held = [e + x.shift for x in extents if x.away is None for e in range(x.start, x.stop)]
    assert held == list(range(len(held)))
    for extent in extents:
        if extent.away is not None:
            assert (extent.start, extent.stop) == layout.shard_range(layout.buckets[extent.away])
    assert {x.away for x in extents} - {None} == away
