"""Heads over ranks: all are held, none is cut, and every key/value head has its queries beside it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.sharding.cut import Cut, Span
from deepspeed.tensor_parallel.heads import HeadShares, Parts, even_parts, share_heads

HEAD_DIM = 3


def _held(parts: Parts, rank: int) -> list[int]:
    return [index for span in parts[rank] for index in range(span.start, span.stop)]


@given(key_heads=st.integers(1, 6), group=st.integers(1, 5), ranks=st.integers(1, 9))
def test_every_query_head_has_one_rank_and_its_key_head_is_there(key_heads: int, group: int, ranks: int) -> None:
    shares = share_heads(key_heads * group, key_heads, ranks)
    queries = [head for span in shares.queries for head in range(span.start, span.stop)]
    assert queries == list(range(key_heads * group))
    for query_span, key_span in zip(shares.queries, shares.keys, strict=True):
        needed = {query // group for query in range(query_span.start, query_span.stop)}
        assert set(range(key_span.start, key_span.stop)) == needed
        if key_span.length:  # attention repeats every key head equally often
            assert query_span.length % key_span.length == 0
            assert [query // group - key_span.start for query in range(query_span.start, query_span.stop)] == [
                each // (query_span.length // key_span.length) for each in range(query_span.length)
            ]


@given(key_heads=st.integers(1, 6), group=st.integers(1, 5), ranks=st.integers(1, 9))
def test_fused_orders_hold_the_same_heads(key_heads: int, group: int, ranks: int) -> None:
    query_heads = key_heads * group
    shares = share_heads(query_heads, key_heads, ranks)
    heads = [
        f"{kind}{index}"
        for kind, count in (("q", query_heads), ("k", key_heads), ("v", key_heads))
        for index in range(count)
    ]
    grouped = [
        name
        for key in range(key_heads)
        for name in (*(f"q{key * group + each}" for each in range(group)), f"k{key}", f"v{key}")
    ]
    for rank in range(ranks):
        expected = _names(shares, rank)
        in_sections = [heads[index // HEAD_DIM] for index in _held(shares.section_rows(HEAD_DIM), rank)]
        in_groups = [grouped[index // HEAD_DIM] for index in _held(shares.group_rows(HEAD_DIM), rank)]
        assert in_sections == [name for name in expected for _ in range(HEAD_DIM)]
        assert sorted(in_groups) == sorted(in_sections)
    for parts in (shares.section_rows(HEAD_DIM), shares.group_rows(HEAD_DIM)):
        Cut(((query_heads + 2 * key_heads) * HEAD_DIM,), 0, parts)  # covers all, or raises


def _names(shares: HeadShares, rank: int) -> list[str]:
    queries, keys = shares.queries[rank], shares.keys[rank]
    return [
        *(f"q{index}" for index in range(queries.start, queries.stop)),
        *(f"{kind}{index}" for kind in "kv" for index in range(keys.start, keys.stop)),
    ]


def test_ranks_beyond_the_key_heads_share_a_copy_of_one() -> None:
    shares = share_heads(8, 2, 4)
    assert shares.queries == (Span(0, 2), Span(2, 2), Span(4, 2), Span(6, 2))
    assert shares.keys == (Span(0, 1), Span(0, 1), Span(1, 1), Span(1, 1))
    assert shares.group_rows(1) == (
        (Span(0, 2), Span(4, 2)),
        (Span(2, 4),),
        (Span(6, 2), Span(10, 2)),
        (Span(8, 4),),
    )


def test_uneven_counts_and_ranks_without_a_head() -> None:
    assert [span.length for span in share_heads(6, 3, 2).queries] == [4, 2]
    assert [span.length for span in share_heads(6, 2, 4).queries] == [2, 1, 2, 1]
    empty = share_heads(2, 1, 3)
    assert [span.length for span in empty.queries] == [1, 1, 0]
    assert empty.section_rows(4)[2] == ()


def test_fused_sections_are_cut_each_by_itself_in_whole_grains() -> None:
    assert even_parts(10, 2, 4) == ((Span(0, 8),), (Span(8, 2),))
    assert even_parts(12, 2, 1, (6, 6)) == ((Span(0, 3), Span(6, 3)), (Span(3, 3), Span(9, 3)))
    assert even_parts(2, 3) == ((Span(0, 1),), (Span(1, 1),), (Span(2, 0),))
