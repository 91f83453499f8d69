"""Which columns are important, and where their elements lie."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.zero.zenflow.columns import column_squares, important_columns, kept_count, positions_of

shapes = st.tuples(st.integers(1, 6), st.integers(1, 7))


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns))


@given(shape=shapes, cuts=st.lists(st.integers(0, 42), max_size=4))
def test_the_parts_of_a_matrix_add_up_to_its_columns(shape: tuple[int, int], cuts: list[int]) -> None:
    whole = matrix(*shape)
    flat = whole.view(-1)
    borders = [0, *sorted(min(cut, flat.numel()) for cut in cuts), flat.numel()]
    parts = [column_squares(flat[a:b], a, shape[1]) for a, b in itertools.pairwise(borders)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole.double().square().sum(0), rtol=1e-14, atol=0)


@given(shape=shapes, cuts=st.lists(st.integers(0, 42), max_size=4), data=st.data())
def test_every_element_of_a_chosen_column_is_found_once(
    shape: tuple[int, int], cuts: list[int], data: st.DataObject
) -> None:
    rows, columns = shape
    chosen = sorted(data.draw(st.sets(st.integers(0, columns - 1))))
    borders = [0, *sorted(min(cut, rows * columns) for cut in cuts), rows * columns]
    found = torch.zeros(rows, columns).view(-1)
    for a, b in itertools.pairwise(borders):
        places = positions_of(torch.tensor(chosen, dtype=torch.int64), columns, a, b - a)
        assert places.tolist() == sorted(places.tolist())
        found[a:b][places] += 1
    want = torch.zeros(rows, columns)
    want[:, chosen] = 1
    assert torch.equal(found.view(rows, columns), want)


def test_the_largest_columns_are_important_and_of_equal_ones_the_first() -> None:
    assert important_columns(torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0]), 0.4).tolist() == [1, 3]
    assert important_columns(torch.tensor([0.0, 0.0, 0.0]), 0.5).tolist() == [0, 1]


@given(columns=st.integers(1, 1000), ratio=st.floats(0.001, 0.999))
def test_the_number_of_important_columns_follows_the_ratio(columns: int, ratio: float) -> None:
    kept = kept_count(columns, ratio)
    assert 1 <= kept <= columns
    assert abs(kept - columns * ratio) <= 0.5 or kept == 1
