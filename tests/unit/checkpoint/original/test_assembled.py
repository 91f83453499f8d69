"""Tensors put together when they are read: every range equals that of the whole tensor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.checkpoint.original.reading import assembled
from deepspeed.checkpoint.original.reading.assembled import FlatValues, Joined, Mean, Pieces, Section, Stored, TensorTable
from deepspeed.errors import ArgumentError


def read(values: FlatValues, start: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((length,), -1, dtype=dtype)
    values.read(start, out)
    return out


@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_pieces_read_as_one_tensor(numels: list[int], data: st.DataObject) -> None:
    whole = torch.arange(float(sum(numels)))
    pieces = Pieces(list(whole.split(numels)) if numels else [])
    assert pieces.numel == whole.numel()
    start = data.draw(st.integers(0, whole.numel()))
    length = data.draw(st.integers(0, whole.numel() - start))
    assert torch.equal(read(pieces, start, length), whole[start : start + length])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2), st.integers(1, 30), st.data())
def test_parts_side_by_side_read_as_their_concatenation(
    sizes: list[int], dim: int, staging_numel: int, data: st.DataObject
) -> None:
    shapes = [[2, 3, 2] for _ in sizes]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[dim] = size
    parts = [torch.randn(shape) for shape in shapes]
    whole = torch.cat(parts, dim)
    rows, behind = math.prod(whole.shape[:dim]), math.prod(whole.shape[dim + 1 :])
    sections = [Section(number, 0, size * behind) for number, size in enumerate(sizes)]
    joined = Joined([Pieces([part.flatten()]) for part in parts], sections, rows)
    start = data.draw(st.integers(0, whole.numel()))
    length = data.draw(st.integers(0, whole.numel() - start))
    before = assembled._STAGING_NUMEL
    assembled._STAGING_NUMEL = staging_numel  # small, so that long rows and several blocks both happen
    try:
        assert torch.equal(read(joined, start, length), whole.flatten()[start : start + length])
    finally:
        assembled._STAGING_NUMEL = before


def test_values_are_converted_to_the_destination() -> None:
    values = Pieces([torch.tensor([1.5, 2.5]), torch.tensor([3.5])])
    assert torch.equal(read(values, 0, 3, torch.float64), torch.tensor([1.5, 2.5, 3.5], dtype=torch.float64))
    assert torch.equal(read(values, 1, 2, torch.bfloat16), torch.tensor([2.5, 3.5], dtype=torch.bfloat16))


def test_the_mean_of_parts_is_read() -> None:
    mean = Mean([Pieces([torch.tensor([1.0, 2.0, 3.0])]), Pieces([torch.tensor([3.0, 4.0, 6.0])])])
    assert torch.equal(read(mean, 1, 2), torch.tensor([3.0, 4.5]))


@pytest.fixture
def table() -> TensorTable:
    made = TensorTable(Path("here"))
    made.add("module/b", Stored((2, 2), torch.float32, Pieces([torch.arange(5.0)])))  # one element of padding
    made.add("module/a", Stored((), torch.float32, Pieces([torch.tensor([7.0])])))
    made.add("master/b", Stored((0,), torch.float32, Pieces([])))
    return made


def test_a_table_reads_as_a_source_does(table: TensorTable) -> None:
    assert table.names() == ["master/b", "module/a", "module/b"]
    assert table.names("module/") == ["module/a", "module/b"]
    assert (table.shape("module/b"), table.dtype("module/b")) == ((2, 2), torch.float32)
    assert torch.equal(table.read("module/b"), torch.arange(4.0))
    assert torch.equal(table.read("module/b", 1), torch.tensor([1.0, 2.0, 3.0]))
    out = torch.zeros(2, dtype=torch.float64)
    assert table.read("module/b", 2, out=out) is out
    assert out.tolist() == [2, 3]
    assert table.read("module/a").tolist() == [7]
    assert table.read("master/b").numel() == 0


def test_a_range_or_destination_that_does_not_fit_is_refused(table: TensorTable) -> None:
    for start, length in ((-1, 2), (0, 5), (4, 1), (2, -1)):
        with pytest.raises(ArgumentError, match="has 4 elements"):
            table.read("module/b", start, length)
    with pytest.raises(ArgumentError, match=r"must be \(4,\)"):
        table.read("module/b", 0, 4, torch.zeros(2, 2))
    with pytest.raises(ArgumentError, match=r"'module/bb'.*'module/b'"):
        table.read("module/bb")
