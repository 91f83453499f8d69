"""One batch for many numbers of ranks: the documented rule, its worked examples, and what must hold for all blocks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed.config.elastic_batch import HIGHLY_COMPOSITE, elastic_batch, elastic_sizes
from deepspeed.config.elasticity import ElasticityConfig
from deepspeed.errors import ElasticityConfigError, ElasticityIncompatibleWorldSize

MANY = [8, 12, 16, 17]


def block(micros: list[int], limit: int, low: int = 1, high: int = 10_000, **more: Any) -> ElasticityConfig:
    sizes = {"max_train_batch_size": limit, "micro_batch_sizes": micros, "min_gpus": low, "max_gpus": high}
    return ElasticityConfig(**{"enabled": True, "version": 0.1, **sizes, **more})


def test_the_first_worked_example() -> None:
    batch = elastic_batch(block([2, 4, 6], 2000))
    assert batch.train == 1680
    assert batch.counts == [
        *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 20, 21, 24, 28, 30, 35, 40, 42, 56, 60, 70, 84, 105, 120, 140, 168),
        *(210, 280, 420, 840),
    ]


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(60, 4, 7), (1, 6, 280), (840, 2, 1)])
def test_the_micro_batches_of_the_first_example(ranks: int, micro: int, accumulation: int) -> None:
    sizes = elastic_sizes(block([2, 4, 6], 2000), ranks)
    assert (sizes.micro, sizes.accumulation) == (micro, accumulation)


def test_a_count_that_does_not_fit_is_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"64 data-parallel ranks.*needed 60 or 70 ranks"):
        elastic_sizes(block([2, 4, 6], 2000), 64)


def test_the_second_worked_example() -> None:
    example = block(MANY, 10_000, 32, 1500)
    batch = elastic_batch(example)
    assert batch.train == 9792
    expected = [32, 34, 36, 48, 51, 64, 68, 72, 96, 102, 136, 144, 153, 192, 204, 272, 288, 306, 408, 576, 612, 816, 1224]
    assert batch.counts == expected
    assert elastic_sizes(example, 64)[:3] == (9792, 17, 9)


@pytest.mark.parametrize(("ranks", "micro"), [(64, 12), (24, 16), (8, 16)])
def test_the_third_worked_example_counts_nodes(ranks: int, micro: int) -> None:
    example = block(MANY, 10_000, 8, 256, version=0.2, num_gpus_per_node=8, model_parallel_size=2)
    sizes = elastic_sizes(example, ranks)
    assert (sizes.train, sizes.micro) == (7680, micro)
    assert sizes.counts == [4, 8, 12, 16, 20, 24, 32, 40, 48, 60, 64, 80, 96, 120, 128]


def test_the_fourth_worked_example() -> None:
    assert elastic_batch(block([3, 7], 100, 1, 20)) == (84, [1, 2, 3, 4, 6, 7, 12, 14])


def test_a_smaller_batch_wins_a_tie_where_that_is_preferred() -> None:
    larger, smaller = (elastic_batch(block([2, 4], 16, prefer_larger_batch=choice)) for choice in (True, False))
    assert len(larger.counts) == len(smaller.counts)
    assert (larger.train, smaller.train) == (16, 12)


def test_a_count_that_fits_none_for_many_gets_a_batch_of_its_own_from_version_2() -> None:
    assert elastic_batch(block([2, 4], 16, version=0.2)).counts == [1, 2, 4, 8]
    assert elastic_sizes(block([2, 4], 16, version=0.2), 3)[:3] == (12, 4, 1)
    assert elastic_sizes(block([2, 4], 100, version=0.2, prefer_larger_batch=False), 31)[:3] == (62, 2, 1)


def test_too_many_ranks_for_the_limit_are_refused_by_name() -> None:
    with pytest.raises(
        ElasticityIncompatibleWorldSize, match=r"a batch of at least 18.*max_train_batch_size, 16.*at most 8"
    ):
        elastic_sizes(block([2, 4], 16, version=0.2), 9)


def test_ranks_that_do_not_make_whole_model_parallel_groups_are_refused() -> None:
    example = block([2, 4], 16, version=0.2, num_gpus_per_node=2, model_parallel_size=2)
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"3 ranks with elasticity.model_parallel_size 2"):
        elastic_sizes(example, 3)


@pytest.mark.parametrize("example", [block([8], 7), block([2], 8, 100, 200)], ids=["limit", "range"])
def test_limits_that_leave_no_batch_say_so(example: ElasticityConfig) -> None:
    with pytest.raises(ElasticityConfigError, match=r"no batch of up to .* Raise elasticity\.max_train_batch_size"):
        elastic_batch(example)


def test_the_multiples_are_the_numbers_with_more_divisors_than_all_before() -> None:
    last = HIGHLY_COMPOSITE[-1]
    divisors = [0] * (last + 1)
    for step in range(1, last + 1):
        for number in range(step, last + 1, step):
            divisors[number] += 1
    records, most = [], 0
    for number in range(1, last + 1):
        if divisors[number] > most:
            records.append(number)
            most = divisors[number]
    assert list(HIGHLY_COMPOSITE) == records


blocks = st.builds(
    block,
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 3000),
    st.integers(1, 6),
    st.integers(6, 80),
    version=st.sampled_from([0.1, 0.2]),
    num_gpus_per_node=st.sampled_from([4, 8]),
    prefer_larger_batch=st.booleans(),
)


@given(blocks)
def test_a_batch_never_exceeds_the_limit_and_every_count_divides_it_into_whole_micro_batches(example: Any) -> None:
    try:
        batch = elastic_batch(example)
    except ElasticityConfigError:
        assume(False)
    assert batch.counts == sorted(set(batch.counts))
    assert 0 < batch.train <= example.max_train_batch_size
    for count in batch.counts:
        assert any(batch.train % (micro * count) == 0 for micro in example.micro_batch_sizes)


@given(blocks, st.integers(0, 79), st.sampled_from([1, 2, 4]))
def test_sizes_always_multiply_out(example: Any, number: int, model_parallel: int) -> None:
    if example.version >= 0.2:
        example = example.model_copy(update={"model_parallel_size": model_parallel})
    try:
        counts = elastic_batch(example).counts
    except ElasticityConfigError:
        assume(False)
    ranks = counts[number % len(counts)] * example.model_parallel_size
    sizes = elastic_sizes(example, ranks)
    assert sizes.micro in example.micro_batch_sizes
    assert sizes.train <= example.max_train_batch_size
    assert sizes.micro * sizes.accumulation * (ranks // example.model_parallel_size) == sizes.train
