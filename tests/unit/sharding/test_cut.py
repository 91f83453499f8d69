"""Cuts of parameters: every index has a rank, copies are known, stored order is the parts one after another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.sharding import Cut, Span, even_widths


@given(numel=st.integers(0, 60), ranks=st.integers(1, 9), grain=st.integers(1, 7))
def test_widths_share_everything_out_in_whole_grains(numel: int, ranks: int, grain: int) -> None:
    widths = even_widths(numel, ranks, grain)
    assert len(widths) == ranks
    assert sum(widths) == numel
    whole_grains = [width for width in widths if width % grain == 0]
    assert len(whole_grains) >= ranks - 1  # only the last grain may be smaller
    assert max(widths) - min(widths) < 2 * grain  # one grain more, and the last one short


@st.composite
def _cuts(draw: st.DrawFn) -> Cut:
    """Fused sections, some with copies: each rank then holds the section of its group."""
    ranks, dims = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    parts: list[list[Span]] = [[] for _ in range(ranks)]
    start = 0
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            length = draw(st.integers(0, 3))
            for spans in parts:
                spans.append(Span(start, length))
            start += length
        else:
            for spans, width in zip(parts, draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)), strict=True):
                spans.append(Span(start, width))
                start += width
    shape = [draw(st.integers(1, 3)) for _ in range(dims)]
    shape[dim] = start
    return Cut(tuple(shape), dim, tuple(tuple(spans) for spans in parts))


def _part(cut: Cut, whole: np.ndarray, rank: int) -> np.ndarray:
    spans = [np.take(whole, range(span.start, span.stop), cut.dim) for span in cut.parts[rank]]
    return np.concatenate(spans, cut.dim)


@given(_cuts())
def test_stored_order_is_the_parts_one_after_another(cut: Cut) -> None:
    whole = np.arange(np.prod(cut.shape)).reshape(cut.shape)
    parts = [_part(cut, whole, rank) for rank in range(cut.ranks)]
    starts = cut.stored_starts()
    assert [part.shape for part in parts] == [cut.part_shape(rank) for rank in range(cut.ranks)]
    assert list(starts) == [0, *np.cumsum([part.size for part in parts])]
    stored = np.concatenate([part.reshape(-1) for part in parts])
    if cut.is_in_order:
        assert stored.tolist() == whole.reshape(-1).tolist()


@given(_cuts())
def test_without_the_copies_every_index_counts_once(cut: Cut) -> None:
    counted = []
    for rank in range(cut.ranks):
        held = [index for span in cut.parts[rank] for index in range(span.start, span.stop)]
        copied = {index for span in cut.copies(rank) for index in range(span.start, span.stop)}
        counted += [index for at, index in enumerate(held) if at not in copied]
    assert sorted(counted) == list(range(cut.shape[cut.dim]))
    assert cut.has_copies() == any(list(cut.copies(rank)) for rank in range(cut.ranks))


def test_key_value_heads_that_ranks_share_name_their_sharers() -> None:
    cut = Cut((4, 8), 0, ((Span(0, 2),), (Span(0, 2),), (Span(2, 2),), (Span(2, 2),)))
    assert [cut.sharers(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert list(cut.copies(1)) == [Span(0, 2)]
    assert list(cut.copies(2)) == []


@pytest.mark.parametrize("parts", [((Span(0, 2),), (Span(3, 1),)), ((Span(0, 4),), (Span(4, 1),)), ((Span(-1, 5),),)])
def test_parts_that_leave_a_hole_or_reach_beyond_are_refused(parts: tuple[tuple[Span, ...], ...]) -> None:
    with pytest.raises(ArgumentError, match="do not cover dimension 0"):
        Cut((4, 2), 0, parts)


def test_neighbours_along_the_first_dimension_are_in_order_and_others_are_not() -> None:
    assert Cut.of_widths((5, 2), 0, (3, 2)).is_in_order
    assert not Cut.of_widths((2, 5), 1, (3, 2)).is_in_order
    assert not Cut.of_widths((8, 2), 0, (2, 2), (2, 2)).is_in_order
