"""The orders of works: written out where they are short, and what holds for all of them."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError, PipelineError
from deepspeed.pipe.orders import (
    OrderName,
    Work,
    activation_bound,
    check,
    live_peak,
    needs,
    one_f_one_b,
    order_of,
    text,
    zero_bubble,
)

NAMES: tuple[OrderName, ...] = get_args(OrderName)
STAGES, MICRO_BATCHES = st.integers(1, 9), st.integers(1, 24)


def _orders(name: OrderName, stages: int, micro_batches: int, chunks: int) -> list[tuple[Work, ...]]:
    return [order_of(name, stage, stages, micro_batches, chunks) for stage in range(stages)]


def _chunks_of(name: OrderName, chunks: int) -> int:
    return chunks if name in ("interleaved", "inference") else 1


@pytest.mark.parametrize(
    ("name", "stage", "stages", "micro_batches", "chunks", "expected"),
    [
        ("1f1b", 0, 2, 4, 1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1f1b", 1, 2, 4, 1, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("1f1b", 0, 4, 6, 1, "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"),
        ("1f1b", 0, 4, 2, 1, "F0 F1 B0 B1"),
        ("gpipe", 1, 2, 3, 1, "F0 F1 F2 B0 B1 B2"),
        ("zero_bubble", 0, 2, 4, 1, "F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3"),
        ("zero_bubble", 1, 2, 4, 1, "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"),
        ("interleaved", 0, 2, 2, 2, "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"),
        ("interleaved", 1, 2, 2, 2, "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"),
        ("interleaved", 1, 2, 3, 2, "F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 B0 B1 B2"),
        ("interleaved", 1, 2, 1, 2, "F0 F0.1 B0.1 B0"),
        ("inference", 0, 2, 3, 1, "F0 F1 F2"),
        ("inference", 0, 2, 4, 2, "F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1"),
    ],
)
def test_short_orders_are_as_written_here(
    name: OrderName, stage: int, stages: int, micro_batches: int, chunks: int, expected: str
) -> None:
    assert text(order_of(name, stage, stages, micro_batches, chunks)) == expected


@given(name=st.sampled_from(NAMES), stages=STAGES, micro_batches=MICRO_BATCHES, chunks=st.integers(1, 4))
def test_all_stages_can_carry_every_order_out_within_its_bound(
    name: OrderName, stages: int, micro_batches: int, chunks: int
) -> None:
    chunks = _chunks_of(name, chunks)
    bounds = [activation_bound(name, stage, stages, micro_batches, chunks) for stage in range(stages)]
    check(_orders(name, stages, micro_batches, chunks), bounds)


@given(name=st.sampled_from(NAMES), stages=STAGES, micro_batches=MICRO_BATCHES, chunks=st.integers(2, 4))
def test_gradients_of_a_chunk_are_summed_by_ascending_micro_batch(
    name: OrderName, stages: int, micro_batches: int, chunks: int
) -> None:
    chunks = _chunks_of(name, chunks)
    for order in _orders(name, stages, micro_batches, chunks):
        for kind in {work.kind for work in order} - {"F"}:
            for chunk in range(chunks):
                of_chunk = [work.micro_batch for work in order if work.kind == kind and work.chunk == chunk]
                assert of_chunk == list(range(micro_batches))


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_the_bounds_of_1f1b_and_zero_bubble_are_met_exactly(stages: int, micro_batches: int) -> None:
    first = live_peak(list(one_f_one_b(0, stages, micro_batches)))
    assert first == min(stages, micro_batches)
    for stage in range(stages):
        assert live_peak(list(one_f_one_b(stage, stages, micro_batches))) == min(stages - stage, micro_batches)
        assert live_peak(list(zero_bubble(stage, stages, micro_batches))) == first


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 13))
def test_one_chunk_interleaved_is_1f1b(stages: int, micro_batches: int) -> None:
    assert _orders("interleaved", stages, micro_batches, 1) == _orders("1f1b", stages, micro_batches, 1)


@given(stages=STAGES, chunks=st.integers(1, 4))
def test_what_is_needed_forms_one_way_through_the_virtual_stages_and_back(stages: int, chunks: int) -> None:
    """From the first stage's backward back to its forward, every work of the micro-batch is met once."""
    place, work, met = 0, Work("B", 0, 0), Counter[tuple[int, Work]]()
    while True:
        met[place, work] += 1
        if not (before := needs(work, place, stages, chunks)):
            break
        place, work = before[-1]
    assert met == Counter(
        (stage, Work(kind, 0, chunk)) for stage in range(stages) for kind in "FB" for chunk in range(chunks)
    )
    assert needs(Work("W", 3, 0), 0, stages, chunks) == [(0, Work("B", 3, 0))]


def test_orders_that_wait_for_each_other_are_named() -> None:
    first, last = order_of("1f1b", 0, 2, 2), order_of("1f1b", 1, 2, 2)
    late = (first[0], first[2], first[1], first[3])
    check([first, last])
    turned = (last[0], last[2], last[1], last[3])
    check([first, turned])  # F0 F1 B0 B1: the last stage may also be late
    with pytest.raises(PipelineError, match=r"for ever, at \{'stage 0': 'B0', 'stage 1': 'F1'\}"):
        check([late, turned])


def test_a_work_that_is_missing_or_done_twice_is_named() -> None:
    order = order_of("gpipe", 0, 1, 3)
    with pytest.raises(PipelineError, match=r"stage 0 .* missing or repeated: B1"):
        check([[work for work in order if str(work) != "B1"]])
    with pytest.raises(PipelineError, match=r"stage 0 .* missing or repeated: F2"):
        check([[*order, Work("F", 2)]])


def test_an_order_above_its_bound_is_refused() -> None:
    with pytest.raises(PipelineError, match="stage 1 keeps 3 activations; at most 1"):
        check(_orders("gpipe", 2, 3, 1), bounds=[3, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dualpipe", 0, 2, 4, 1), "'dualpipe' is not known. Use one of 1f1b, gpipe"),
        (("1f1b", 2, 2, 4, 1), "stage=2, stages=2"),
        (("1f1b", 0, 2, 0, 1), "micro_batches=0"),
        (("1f1b", 0, 2, 4, 2), "'1f1b' has one chunk per stage, and 2 were given. Use 'interleaved'"),
    ],
)
def test_what_no_order_can_be_made_of_is_refused(arguments: tuple[OrderName, int, int, int, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        order_of(*arguments)
