"""Attention heads over ranks: which rank has which, and which rows of the projections that is.

    8 query heads, 2 key/value heads, head_dim 4, over 4 ranks

    queries   | 0 1 | 2 3 | 4 5 | 6 7 |        q_proj: 8 rows each
    keys      |  0  |  0  |  1  |  1  |        k_proj, v_proj: 4 rows each, held twice

Heads are never cut. Key/value heads follow their query heads: ranks get whole groups of them while there are enough groups,
and where there are more ranks than key/value heads, several ranks hold a copy of one and share its query heads out. So on
every rank each key/value head has the same number of queries, which is what attention code expects. Counts may be uneven.

Two orders of fused projections cover what models do:

    sections    | q0 q1 q2 q3 | k0 k1 | v0 v1 |        GPT-2, Phi-3
    groups      | q0 q1 k0 v0 | q2 q3 k1 v1 |          GPT-NeoX, Bloom (groups of one query head), Falcon

Pure: no tensors. Does not live here: finding attention in a model (`attention`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed.sharding.cut import Span, even_widths

__all__ = ["HeadShares", "Parts", "even_parts", "share_heads"]

Parts = tuple[tuple[Span, ...], ...]
"""Of each rank, its spans along a dimension."""


@dataclass(frozen=True)
class HeadShares:
    """The heads of each rank.

    Attributes:
        queries: of each rank, its query heads.
        keys: of each rank, its key/value heads.
        group: query heads for each key/value head, of the whole.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    group: int

    def query_rows(self, head_dim: int) -> Parts:
        """Rows of a projection to queries."""
        return tuple(_rows([span], head_dim) for span in self.queries)

    def key_rows(self, head_dim: int) -> Parts:
        """Rows of a projection to keys, or to values."""
        return tuple(_rows([span], head_dim) for span in self.keys)

    def section_rows(self, head_dim: int) -> Parts:
        """Rows of a fused projection: all queries, all keys, all values."""
        key_start = self._total(self.queries)
        value_start = key_start + self._total(self.keys)
        return tuple(
            _rows(
                [queries, Span(key_start + keys.start, keys.length), Span(value_start + keys.start, keys.length)], head_dim
            )
            for queries, keys in zip(self.queries, self.keys, strict=True)
        )

    def pair_rows(self, head_dim: int) -> Parts:
        """Rows of a projection to all keys, then all values."""
        value_start = self._total(self.keys)
        return tuple(_rows([keys, Span(value_start + keys.start, keys.length)], head_dim) for keys in self.keys)

    def group_rows(self, head_dim: int) -> Parts:
        """Rows of a fused projection in which each key/value head follows its query heads."""
        return tuple(
            _rows(self._grouped(queries, keys), head_dim) for queries, keys in zip(self.queries, self.keys, strict=True)
        )

    def _grouped(self, queries: Span, keys: Span) -> Iterable[Span]:
        for key in range(keys.start, keys.stop):
            first = max(queries.start, key * self.group)
            last = min(queries.stop, (key + 1) * self.group)
            yield Span(first + 2 * key, last - first)
            yield Span((key + 1) * self.group + 2 * key, 2)

    @staticmethod
    def _total(spans: tuple[Span, ...]) -> int:
        return max(span.stop for span in spans)


def share_heads(query_heads: int, key_heads: int, ranks: int) -> HeadShares:
    """Share heads out; `key_heads` divides `query_heads`. Ranks beyond the number of query heads may get none."""
    group = query_heads // key_heads
    if key_heads >= ranks:
        widths = even_widths(key_heads, ranks)
        keys = _spans(widths)
        return HeadShares(tuple(Span(span.start * group, span.length * group) for span in keys), keys, group)
    queries: list[Span] = []
    keys_of: list[Span] = []
    for key, sharers in enumerate(even_widths(ranks, key_heads)):
        for span in _spans(even_widths(group, sharers)):
            queries.append(Span(key * group + span.start, span.length))
            keys_of.append(Span(key, min(span.length, 1)))
    return HeadShares(tuple(queries), tuple(keys_of), group)


def even_parts(numel: int, ranks: int, grain: int = 1, sections: tuple[int, ...] | None = None) -> Parts:
    """Spans of `numel` indices for each rank, in whole grains; of each section by itself where there are several."""
    sections = sections or (numel,)
    parts: list[list[Span]] = [[] for _ in range(ranks)]
    start = 0
    for section in sections:
        for rank, span in enumerate(_spans(even_widths(section, ranks, grain))):
            parts[rank].append(Span(start + span.start, span.length))
        start += section
    return tuple(tuple(spans) for spans in parts)


def _spans(widths: tuple[int, ...]) -> tuple[Span, ...]:
    return tuple(Span(sum(widths[:rank]), width) for rank, width in enumerate(widths))


def _rows(heads: Iterable[Span], head_dim: int) -> tuple[Span, ...]:
    """Rows of those heads; neighbours become one span, empty ones go unless nothing is left."""
    merged: list[Span] = []
    for span in heads:
        if not span.length:
            continue
        start, length = span.start * head_dim, span.length * head_dim
        if merged and merged[-1].stop == start:
            merged[-1] = Span(merged[-1].start, merged[-1].length + length)
        else:
            merged.append(Span(start, length))
    return tuple(merged)
