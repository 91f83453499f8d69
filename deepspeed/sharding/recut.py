"""Where the elements of a part lie while another cut of the same tensor is stored.

    stored   row 0 of rank 0 | row 1 of rank 0 | ... | row 0 of rank 1 | row 1 of rank 1 | ...      (`Cut`: stored order)
                  |  ^^^^^          ^^^^^                ^^                ^^
    wanted        '-> row 0: columns of rank 0, columns of rank 1; row 1: the same columns, one stored row further; ...

What one stored part gives to all rows of a wanted one is one `Rows`: a few numbers, however many rows there are.

Does not live here: bytes and files (`checkpoint.disk.gathering`, which calls this).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from deepspeed.errors import ArgumentError
from deepspeed.sharding.cut import Cut, Span

__all__ = ["Columns", "Rows", "rows_of", "uncut"]


class Columns(NamedTuple):
    """Elements `[start, start + numel)` of a stored row are `[at, at + numel)` of a wanted one."""

    start: int
    at: int
    numel: int


class Rows(NamedTuple):
    """What one stored part gives to a number of rows.

    Attributes:
        start: where the first row begins in stored order.
        stride: elements from one stored row to the next.
        times: how many rows.
        at: where the first row begins in what is filled.
        at_stride: elements from one filled row to the next.
        columns: of each row, sorted by `at`.
    """

    start: int
    stride: int
    times: int
    at: int
    at_stride: int
    columns: tuple[Columns, ...]


class _Segment(NamedTuple):
    """Indices `[start, start + length)` of the whole are `[local, local + length)` of a stored rank's part."""

    start: int
    length: int
    rank: int
    local: int


def uncut(shape: tuple[int, ...], dim: int) -> Cut:
    """A whole tensor, as one part."""
    return Cut(shape, dim, ((Span(0, shape[dim]),),))


def rows_of(stored: Cut, wanted: Cut, rank: int, start: int, length: int) -> Iterator[Rows]:
    """What fills elements `[start, start + length)` of the flattened part of `rank`.

    Args:
        stored: how the tensor lies there; of indices that several ranks hold, one rank's count.
        wanted: cut along the same dimension of the same shape.
        rank: whose part under `wanted`.
        start: first element.
        length: elements; inside the part.

    Raises:
        ArgumentError: the cuts are of different shapes or dimensions.
    """
    if (stored.shape, stored.dim) != (wanted.shape, wanted.dim):
        raise ArgumentError(
            f"a part of a tensor of shape {wanted.shape} along dimension {wanted.dim} was asked of one that is stored as "
            f"{stored.shape}, cut along {stored.dim}. Both must be the same."
        )
    if not length:
        return
    same = _same_part(stored, wanted.parts[rank], rank)
    if same is not None:
        yield Rows(stored.stored_starts()[same] + start, length, 1, 0, length, (Columns(0, 0, length),))
        return
    row_numel = wanted.width(rank) * wanted.inner
    first, skipped = divmod(start, row_numel)
    of_ranks = _columns(stored, wanted.parts[rank])
    at = 0
    if skipped:
        at = min(row_numel - skipped, length)
        yield from _some(stored, of_ranks, first, skipped, at, 0)
        first += 1
    count, left = divmod(length - at, row_numel)
    if count:
        for holder, columns in of_ranks:
            begin, stride = _row(stored, holder, first)
            yield _joined(Rows(begin, stride, count, at, row_numel, columns))
    if left:
        yield from _some(stored, of_ranks, first + count, 0, left, at + count * row_numel)


def _some(
    stored: Cut, of_ranks: Sequence[tuple[int, tuple[Columns, ...]]], row: int, skipped: int, numel: int, at: int
) -> Iterator[Rows]:
    """Elements `[skipped, skipped + numel)` of one wanted row, which go to `at`."""
    for holder, columns in of_ranks:
        kept = []
        for each in columns:
            low, high = max(each.at, skipped), min(each.at + each.numel, skipped + numel)
            if low < high:
                kept.append(Columns(each.start + low - each.at, low - skipped, high - low))
        if kept:
            begin, stride = _row(stored, holder, row)
            yield Rows(begin, stride, 1, at, numel, tuple(kept))


def _row(stored: Cut, holder: int, row: int) -> tuple[int, int]:
    """Where a row of a stored part begins, and how many elements it has."""
    stride = stored.width(holder) * stored.inner
    return stored.stored_starts()[holder] + row * stride, stride


def _joined(rows: Rows) -> Rows:
    """Rows that follow each other without gaps, here and there, are one."""
    if len(rows.columns) == 1 and rows.columns[0].numel == rows.stride == rows.at_stride:
        numel = rows.times * rows.stride
        return Rows(rows.start, numel, 1, rows.at, numel, (Columns(0, 0, numel),))
    return rows


@lru_cache(maxsize=256)
def _same_part(stored: Cut, wanted: tuple[Span, ...], rank: int) -> int | None:
    """A rank whose stored part is the wanted one; that of the same number, where it is."""
    needed = _merged(wanted)
    near = range(rank, min(rank + 1, stored.ranks))
    return next((holder for holder in (*near, *range(stored.ranks)) if _merged(stored.parts[holder]) == needed), None)


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Without empty spans, and neighbours that follow each other as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, found[-1].length + span.length)
        elif span.length:
            found.append(span)
    return found


@lru_cache(maxsize=256)
def _columns(stored: Cut, wanted: tuple[Span, ...]) -> tuple[tuple[int, tuple[Columns, ...]], ...]:
    """What each stored part that has something of `wanted` gives to a row."""
    segments = _segments(stored)
    starts = [segment.start for segment in segments]
    of_ranks: dict[int, list[Columns]] = {}
    at = 0
    for span in wanted:
        for segment in segments[max(bisect_right(starts, span.start) - 1, 0) :]:
            low, high = max(segment.start, span.start), min(segment.start + segment.length, span.stop)
            if segment.start >= span.stop:
                break
            if low < high:
                found = Columns(
                    (segment.local + low - segment.start) * stored.inner,
                    (at + low - span.start) * stored.inner,
                    (high - low) * stored.inner,
                )
                _append(of_ranks.setdefault(segment.rank, []), found)
        at += span.length
    return tuple((rank, tuple(columns)) for rank, columns in of_ranks.items())


def _append(columns: list[Columns], more: Columns) -> None:
    last = columns[-1] if columns else None
    if last is not None and (last.start + last.numel, last.at + last.numel) == (more.start, more.at):
        columns[-1] = Columns(last.start, last.at, last.numel + more.numel)
    else:
        columns.append(more)


def _segments(stored: Cut) -> list[_Segment]:
    """Who gives which indices of the whole: sorted, each index once."""
    held = []
    for rank, spans in enumerate(stored.parts):
        local = 0
        for span in spans:
            if span.length:
                held.append(_Segment(span.start, span.length, rank, local))
            local += span.length
    segments, reached = [], 0
    for start, length, rank, local in sorted(held):
        gained = start + length - reached
        if gained > 0:
            skipped = length - gained if start < reached else 0
            segments.append(_Segment(start + skipped, length - skipped, rank, local + skipped))
            reached = start + length
    return segments
