"""Parts out of another cut's stored order: every element comes from where it lies, once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.sharding import Columns, Cut, Rows, Span, rows_of, uncut
from tests.support.random_cuts import part_of, stored_of, two_cuts


@given(cuts=two_cuts(), data=st.data())
def test_any_range_of_a_part_is_found_in_what_is_stored(cuts: tuple[Cut, Cut], data: st.DataObject) -> None:
    stored, wanted = cuts
    whole = np.arange(np.prod(stored.shape)).reshape(stored.shape)
    lying = stored_of(stored, whole)
    rank = data.draw(st.integers(0, wanted.ranks - 1))
    part = part_of(wanted, whole, rank).reshape(-1)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, part.size), st.integers(0, part.size))))
    out, times = np.full(stop - start, -1), np.zeros(stop - start, dtype=int)
    for rows in rows_of(stored, wanted, rank, start, stop - start):
        for row in range(rows.times):
            for columns in rows.columns:
                here = rows.at + row * rows.at_stride + columns.at
                there = rows.start + row * rows.stride + columns.start
                out[here : here + columns.numel] = lying[there : there + columns.numel]
                times[here : here + columns.numel] += 1
    assert out.tolist() == part[start:stop].tolist()
    assert set(times.tolist()) <= {1}


def _fused(ranks: int) -> Cut:
    widths = [4 // ranks] * ranks
    return Cut.of_widths((3, 12), 1, widths, widths, widths)


def test_a_part_that_is_stored_is_one_run() -> None:
    assert list(rows_of(_fused(2), _fused(2), 1, 3, 9)) == [Rows(18 + 3, 9, 1, 0, 9, (Columns(0, 0, 9),))]


def test_a_part_of_a_part_takes_columns_of_all_rows_at_once() -> None:
    columns = (Columns(1, 0, 1), Columns(3, 1, 1), Columns(5, 2, 1))
    assert list(rows_of(_fused(2), _fused(4), 1, 0, 9)) == [Rows(0, 6, 3, 0, 3, columns)]


def test_a_range_that_begins_and_ends_inside_rows_has_these_apart() -> None:
    found = list(rows_of(_fused(2), _fused(4), 1, 2, 6))
    assert [(rows.times, rows.at) for rows in found] == [(1, 0), (1, 1), (1, 4)]


def test_whole_slabs_along_the_first_dimension_are_single_runs() -> None:
    stored = Cut.of_widths((8, 5), 0, [4, 4])
    found = list(rows_of(stored, uncut((8, 5), 0), 0, 0, 40))
    assert sorted((rows.start, rows.columns[0].numel, rows.times) for rows in found) == [(0, 20, 1), (20, 20, 1)]


def test_of_copies_the_rank_of_the_same_number_is_asked() -> None:
    cut = Cut((1, 4), 0, ((Span(0, 1),),) * 3)
    assert [next(rows_of(cut, cut, rank, 0, 4)).start for rank in range(3)] == [0, 4, 8]


def test_other_shapes_and_dimensions_are_refused() -> None:
    for other in (uncut((3, 12), 0), uncut((4, 12), 1)):
        with pytest.raises(ArgumentError, match="Both must be the same"):
            list(rows_of(_fused(2), other, 0, 0, 1))
