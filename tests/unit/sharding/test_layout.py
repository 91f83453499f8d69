"""The arithmetic of flat buffers, by property and by example."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.sharding import FlatLayout, even_range

numels = st.lists(st.integers(0, 60), max_size=12)
plans = st.builds(
    lambda n, b, a, w: (n, FlatLayout.plan(n, bucket_numel=b, alignment=a, world_size=w), a, w),
    numels,
    st.integers(1, 90),
    st.integers(1, 8),
    st.integers(1, 5),
)


@given(plans)
def test_every_element_of_every_parameter_has_exactly_one_place(plan: tuple[list[int], FlatLayout, int, int]) -> None:
    sizes, layout, _, _ = plan
    places = [(s.start + e) for s in layout.slots for e in range(s.numel)]
    assert len(places) == len(set(places)) == sum(sizes)
    assert all(0 <= place < layout.numel for place in places)
    assert {s.index: s.numel for s in layout.slots} == dict(enumerate(sizes))


@given(plans)
def test_slots_run_in_reverse_order_of_use_and_are_aligned(plan: tuple[list[int], FlatLayout, int, int]) -> None:
    sizes, layout, alignment, _ = plan
    assert [s.index for s in layout.slots] == list(reversed(range(len(sizes))))
    assert all(s.start % alignment == 0 for s in layout.slots)


@given(plans)
def test_buckets_tile_the_buffer_and_divide_into_equal_aligned_shards(plan: tuple[list[int], FlatLayout, int, int]) -> None:
    _, layout, alignment, world_size = plan
    assert [b.start for b in layout.buckets] == [0, *[b.stop for b in layout.buckets]][: len(layout.buckets)]
    assert layout.numel == (layout.buckets[-1].stop if layout.buckets else 0)
    for bucket in layout.buckets:
        assert (bucket.stop - bucket.start) % (alignment * world_size) == 0
        for slot in layout.slots[bucket.first_slot : bucket.last_slot]:
            assert bucket.start <= slot.start <= slot.stop <= bucket.stop
    assert sum(b.last_slot - b.first_slot for b in layout.buckets) == len(layout.slots)


@given(numels, st.integers(1, 90))
def test_a_bucket_over_budget_holds_one_parameter(sizes: list[int], budget: int) -> None:
    layout = FlatLayout.plan(sizes, bucket_numel=budget)
    for bucket in layout.buckets:
        with_elements = [s for s in layout.slots[bucket.first_slot : bucket.last_slot] if s.numel]
        assert bucket.stop - bucket.start <= budget or len(with_elements) == 1


@given(plans, st.data())
def test_fragments_of_a_tiling_cover_each_parameter_once(
    plan: tuple[list[int], FlatLayout, int, int], data: st.DataObject
) -> None:
    sizes, layout, _, _ = plan
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.numel), max_size=5)))
    seen = []
    for low, high in zip([0, *cuts], [*cuts, layout.numel], strict=True):
        for f in layout.fragments(low, high):
            assert low <= f.buffer_start < f.buffer_start + f.numel <= high
            seen += [(f.index, f.param_start + e) for e in range(f.numel)]
    assert sorted(seen) == [(i, e) for i, n in enumerate(sizes) for e in range(n)]


def test_the_picture_of_the_docstring_holds() -> None:
    layout = FlatLayout.plan([2, 6, 3, 2], bucket_numel=8, alignment=2)
    assert [(s.index, s.start, s.stop) for s in layout.slots] == [(3, 0, 2), (2, 2, 5), (1, 6, 12), (0, 12, 14)]
    assert [(b.start, b.stop) for b in layout.buckets] == [(0, 6), (6, 14)]


@given(st.integers(0, 200), st.integers(1, 9))
def test_even_ranges_tile_and_differ_by_at_most_one(numel: int, parts: int) -> None:
    ranges = [even_range(numel, parts, p) for p in range(parts)]
    assert [r[0] for r in ranges] + [numel] == [0] + [r[1] for r in ranges]
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_a_175_billion_parameter_model_is_planned_for_1024_ranks() -> None:
    sizes = [12288 * 12288] * 1156
    layout = FlatLayout.plan(sizes, bucket_numel=500_000_000, alignment=32, world_size=1024)
    assert 0 <= layout.numel - sum(sizes) <= len(layout.buckets) * 32 * 1024


@pytest.mark.parametrize("bad", [{"bucket_numel": 0}, {"alignment": 0}, {"world_size": 0}])
def test_senseless_sizes_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="at least"):
        FlatLayout.plan([1], **{"bucket_numel": 1, "alignment": 1, "world_size": 1, **bad}, units=None)
