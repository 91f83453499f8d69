from __future__ import annotations

from typing import Any

import pytest

from deepspeed.checkpoint.agreement import Alone, together
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from tests.unit.checkpoint.thread_ranks import ThreadRanks, run_threads


def test_every_rank_gets_what_the_first_makes_of_all_results() -> None:
    def body(ranks: ThreadRanks) -> Any:
        return together(ranks, lambda: ranks.rank * 10, lambda results: [sum(results), len(results)])  # type: ignore[arg-type]

    assert run_threads(3, body) == [[30, 3]] * 3


def test_one_process_is_no_special_case() -> None:
    assert together(Alone(), lambda: 4, lambda results: results) == [4]


@pytest.mark.parametrize("kind", [CheckpointError, CheckpointDamagedError, CheckpointNotFoundError, ArgumentError])
def test_an_error_on_one_rank_is_raised_on_all_with_its_class_and_its_rank(kind: type[Exception]) -> None:
    led = []

    def body(ranks: ThreadRanks) -> Any:
        def own() -> None:
            if ranks.rank == 2:
                raise kind("the reason")

        return together(ranks, own, led.append)

    errors = run_threads(3, body)
    assert [(type(error), str(error)) for error in errors] == [(kind, "rank 2: the reason")] * 3
    assert led == []


def test_an_error_of_the_first_rank_s_decision_is_raised_on_all() -> None:
    def body(ranks: ThreadRanks) -> Any:
        def lead(_: object) -> None:
            raise CheckpointDamagedError("no cover")

        return together(ranks, lambda: None, lead)

    assert [(type(error), str(error)) for error in run_threads(2, body)] == [(CheckpointDamagedError, "no cover")] * 2


def test_any_other_exception_becomes_a_checkpoint_error_that_keeps_its_cause() -> None:
    def body(ranks: ThreadRanks) -> Any:
        return together(ranks, lambda: [1, 2][5 if ranks.rank else 0])

    first, second = run_threads(2, body)
    assert type(first) is type(second) is CheckpointError
    assert str(first) == str(second) == "rank 1: IndexError: list index out of range"
    assert isinstance(second.__cause__, IndexError)
    assert first.__cause__ is None


def test_equal_texts_are_told_once_and_different_ones_each() -> None:
    def body(ranks: ThreadRanks) -> Any:
        def own() -> None:
            raise CheckpointError("same" if ranks.rank != 1 else "other")

        return together(ranks, own)

    assert {str(error) for error in run_threads(3, body)} == {"ranks 0, 2: same\nrank 1: other"}
