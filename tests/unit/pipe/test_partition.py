"""Cutting lists of weights: the published results, and what every cut has to be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError, PipelineError
from deepspeed.pipe.partition import matching_weights, partition_balanced, partition_uniform

WEIGHTS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [(10, 4, [0, 3, 6, 8, 10]), (2, 4, [0, 1, 2, 2, 2]), (0, 2, [0, 0, 0]), (5, 5, [0, 1, 2, 3, 4, 5]), (7, 1, [0, 7])],
)
def test_equal_lengths_come_with_the_longer_parts_first(count: int, parts: int, expected: list[int]) -> None:
    assert partition_uniform(count, parts) == expected


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([204, 168, 168, 168, 0, 204], 2, [0, 3, 6]),
        ([1, 1, 1, 1, 100], 3, [0, 2, 4, 5]),
        ([1, 2], 3, [0, 1, 2, 2]),
        ([0.5, 0.25, 0.25], 2, [0, 1, 3]),
        ([], 1, [0, 0]),
    ],
)
def test_balanced_cuts_are_the_published_ones(weights: list[float], parts: int, expected: list[int]) -> None:
    assert partition_balanced(weights, parts) == expected


@given(weights=WEIGHTS, parts=st.integers(1, 10))
def test_no_other_cut_has_a_lighter_heaviest_or_then_a_heavier_lightest_part(weights: list[int], parts: int) -> None:
    boundaries = partition_balanced(weights, parts)
    assert boundaries[0] == 0
    assert boundaries[-1] == len(weights)
    assert boundaries == sorted(boundaries)
    assert len(boundaries) == parts + 1
    if parts > len(weights):
        return
    assert len(set(boundaries)) == parts + 1  # no part is empty

    def judge(cut: tuple[int, ...]) -> tuple[int, int]:
        sums = [sum(weights[start:stop]) for start, stop in itertools.pairwise((0, *cut, len(weights)))]
        return max(sums), -min(sums)

    every_cut = itertools.combinations(range(1, len(weights)), parts - 1)
    assert judge(tuple(boundaries[1:-1])) == min(map(judge, every_cut))


@given(weights=st.lists(st.floats(0, 10), min_size=1, max_size=7), parts=st.integers(1, 7))
def test_fractions_are_cut_as_evenly_as_rounding_allows(weights: list[float], parts: int) -> None:
    boundaries = partition_balanced(weights, parts)
    parts = min(parts, len(weights))

    def heaviest(cut: tuple[int, ...]) -> float:
        return max(sum(weights[start:stop]) for start, stop in itertools.pairwise((0, *cut, len(weights))))

    best = min(heaviest(cut) for cut in itertools.combinations(range(1, len(weights)), parts - 1))
    assert heaviest(tuple(boundaries[1:-1])) <= best * (1 + 1e-9)


def test_fractions_that_do_not_add_up_exactly_are_cut_as_well() -> None:
    assert partition_balanced([0.1] * 10, 5) == [0, 2, 4, 6, 8, 10]
    assert partition_balanced([0.1, 0.2, 0.3], 3) == [0, 1, 2, 3]


def test_layers_are_matched_by_class_in_either_case() -> None:
    assert matching_weights("block|HEAD", ["Embedding", "TransformerBlock", "head"]) == [0, 1, 1]


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"'type:attention' matches no layer\. The classes are: Linear, Tanh"):
        matching_weights("attention", ["Tanh", "Linear", "Tanh"])
    with pytest.raises(PipelineError, match="no regular expression"):
        matching_weights("(", ["Linear"])
    for cut in (lambda: partition_uniform(3, 0), lambda: partition_balanced([1], 0)):
        with pytest.raises(ArgumentError, match="num_parts=0"):
            cut()
