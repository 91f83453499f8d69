"""Cuts drawn at random: fused sections, uneven and empty parts, spans that several ranks hold copies of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from deepspeed.sharding import Cut, Span

__all__ = ["cut_of", "part_of", "stored_of", "two_cuts"]


@st.composite
def cut_of(draw: st.DrawFn, shape: tuple[int, ...], dim: int, most_ranks: int = 4) -> Cut:
    """A cut of this shape along this dimension."""
    ranks = draw(st.integers(1, most_ranks))
    bounds = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2)))
    parts: list[list[Span]] = [[] for _ in range(ranks)]
    for start, stop in zip([0, *bounds], [*bounds, shape[dim]], strict=True):
        if draw(st.booleans()):
            for spans in parts:
                spans.append(Span(start, stop - start))
            continue
        inner = sorted(draw(st.lists(st.integers(start, stop), min_size=ranks - 1, max_size=ranks - 1)))
        order = draw(st.permutations(range(ranks)))
        for rank, low, high in zip(order, [start, *inner], [*inner, stop], strict=True):
            parts[rank].append(Span(low, high - low))
    return Cut(shape, dim, tuple(map(tuple, parts)))


@st.composite
def two_cuts(draw: st.DrawFn, *, along_one: bool = True) -> tuple[Cut, Cut]:
    """Two cuts of one tensor; along the same dimension, or along any."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    other = dim if along_one else draw(st.integers(0, len(shape) - 1))
    return draw(cut_of(shape, dim)), draw(cut_of(shape, other))


def part_of(cut: Cut, whole: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
    """What a rank holds."""
    found: npt.NDArray[Any] = np.concatenate(
        [whole.take(range(0), cut.dim), *(whole.take(range(s.start, s.stop), cut.dim) for s in cut.parts[rank])], cut.dim
    )
    return found


def stored_of(cut: Cut, whole: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The elements in stored order."""
    return np.concatenate([part_of(cut, whole, rank).reshape(-1) for rank in range(cut.ranks)])
