"""How much of a shard is in memory at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ConfigError
from deepspeed.offload.sub_groups import SubGroups, plan_sub_groups


@given(
    shard_numel=st.integers(1, 10**10),
    tensors=st.integers(1, 5),
    sub_group_size=st.integers(1, 10**10),
    extra=st.integers(0, 8),
    ahead=st.booleans(),
    behind=st.booleans(),
)
def test_buffers_stay_within_what_is_granted(
    shard_numel: int, tensors: int, sub_group_size: int, extra: int, ahead: bool, behind: bool
) -> None:
    buffer_count = tensors + extra
    plan = plan_sub_groups(
        shard_numel,
        tensors,
        sub_group_size=sub_group_size,
        buffer_count=buffer_count,
        reads_ahead=ahead,
        writes_behind=behind,
    )
    groups = -(-shard_numel // plan.numel)
    assert 1 <= plan.numel <= max(1, sub_group_size)
    assert 1 <= plan.buffers <= groups
    smallest = 1 + ahead + behind  # overlap needs so many, of one element each at least
    granted = buffer_count * min(sub_group_size, shard_numel)
    assert plan.numel * plan.buffers * tensors <= max(granted, smallest * tensors)


@given(shard_numel=st.integers(1 << 20, 10**10), ahead=st.booleans(), behind=st.booleans())
def test_at_most_three_quarters_of_a_large_shard_are_in_memory(shard_numel: int, ahead: bool, behind: bool) -> None:
    plan = plan_sub_groups(shard_numel, 3, sub_group_size=10**9, buffer_count=4, reads_ahead=ahead, writes_behind=behind)
    groups = -(-shard_numel // plan.numel)
    assert plan.buffers <= max(1 + ahead + behind, groups * 3 // 4)


def test_a_large_shard_with_adam_and_default_keys() -> None:
    plan = plan_sub_groups(3 * 10**9, 3, sub_group_size=10**9, buffer_count=4, reads_ahead=True, writes_behind=True)
    assert plan == SubGroups(numel=1 << 22, buffers=317)  # 4e9 granted elements: 317 x 3 x 2**22


def test_too_few_buffers_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(ConfigError, match=r"buffer_count = 2, but this optimizer keeps 3 tensors.*at least 3"):
        plan_sub_groups(100, 3, sub_group_size=10, buffer_count=2, reads_ahead=False, writes_behind=False)
