from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ConfigError
from deepspeed.offload.parameter_plan import BucketShard, plan_parameters


def _shards(*numels: int, item_nbytes: int = 2) -> list[BucketShard]:
    """One flat group, of which bucket 0 is used last."""
    last = len(numels) - 1
    return [BucketShard(0, n, last - n, numel, item_nbytes, f"layer{last - n}.weight") for n, numel in enumerate(numels)]


def test_the_units_that_are_used_first_stay_in_memory() -> None:
    plan = plan_parameters(_shards(3000, 3000, 3000), max_in_cpu=6000, buffer_size=10**8, buffer_count=5)
    assert dict(plan.offsets) == {(0, 0): 0}  # used last
    assert plan.file_nbytes == plan.buffer_nbytes == 8192  # 6000 bytes in whole pages
    assert plan.buffer_count == 1


def test_nothing_is_planned_where_everything_stays() -> None:
    plan = plan_parameters(_shards(3000, 3000), max_in_cpu=6000, buffer_size=1, buffer_count=0)
    assert not plan.offsets
    assert (plan.file_nbytes, plan.buffer_count, plan.buffer_nbytes) == (0, 0, 0)


def test_a_shard_larger_than_a_buffer_is_refused_with_the_size_that_would_do() -> None:
    with pytest.raises(
        ConfigError, match=r"buffer_size = 2999 .* 'layer1.weight' has 3000.* Set buffer_size to at least 3000"
    ):
        plan_parameters(_shards(3000, 10), max_in_cpu=0, buffer_size=2999, buffer_count=5)
    with pytest.raises(ConfigError, match=r"buffer_count = 0.* at least 1"):
        plan_parameters(_shards(3000, 10), max_in_cpu=0, buffer_size=3000, buffer_count=0)
    plan_parameters(_shards(10, 3000), max_in_cpu=3000, buffer_size=10, buffer_count=1)  # the large one stays


@given(
    numels=st.lists(st.integers(0, 9000), max_size=10),
    max_in_cpu=st.integers(0, 30_000),
    buffer_count=st.integers(1, 4),
    item_nbytes=st.sampled_from([2, 4, 8]),
)
def test_shards_lie_apart_at_pages_and_fit_into_buffers(
    numels: list[int], max_in_cpu: int, buffer_count: int, item_nbytes: int
) -> None:
    shards = _shards(*numels, item_nbytes=item_nbytes)
    plan = plan_parameters(shards, max_in_cpu=max_in_cpu, buffer_size=9000, buffer_count=buffer_count)
    by_key = {(shard.group, shard.bucket): shard for shard in shards}
    places = sorted((start, start + by_key[key].nbytes) for key, start in plan.offsets.items())
    assert all(start % 4096 == 0 for start, _ in places)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(places))
    assert all(stop <= plan.file_nbytes and stop - start <= plan.buffer_nbytes for start, stop in places)
    assert plan.buffer_count <= buffer_count
    assert sum(shard.numel for key, shard in by_key.items() if key not in plan.offsets) <= max_in_cpu
