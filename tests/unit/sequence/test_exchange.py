from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError
from deepspeed.sequence.exchange import HeadPlan, Lengths, even_part


@given(groups=st.integers(1, 9), size=st.integers(1, 5), world_size=st.integers(1, 12))
def test_each_query_head_has_one_rank_and_its_key_head_there(groups: int, size: int, world_size: int) -> None:
    if groups * size < world_size:
        with pytest.raises(ArgumentError, match=rf"{groups * size} query heads over {world_size} sequence-parallel ranks"):
            HeadPlan(groups * size, groups, world_size)
        return
    plan = HeadPlan(groups * size, groups, world_size)
    assert [head for rank in range(world_size) for head in plan.queries(rank)] == list(range(groups * size))
    counts = [len(plan.queries(rank)) for rank in range(world_size)]
    assert max(counts) - min(counts) <= 1
    for rank in range(world_size):
        served = [key for key, uses in zip(plan.keys(rank), plan.uses(rank), strict=True) for _ in range(uses)]
        assert served == [head // size for head in plan.queries(rank)]


@given(total=st.integers(0, 60), world_size=st.integers(1, 9))
def test_tokens_are_spread_in_order_and_evenly(total: int, world_size: int) -> None:
    parts = [even_part(total, rank, world_size) for rank in range(world_size)]
    assert [token for part in parts for token in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if total < world_size:
        with pytest.raises(ArgumentError, match="leaves ranks without a token"):
            Lengths.spread(total, world_size)
        return
    lengths = Lengths.spread(total, world_size)
    assert (lengths.total, list(lengths.starts)) == (total, [part.start for part in parts])


def test_key_heads_that_do_not_divide_the_query_heads_are_refused() -> None:
    with pytest.raises(ArgumentError, match="5 query heads with 2 key and value heads"):
        HeadPlan(5, 2, 1)
