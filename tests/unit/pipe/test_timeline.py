"""Orders carried out on paper take as long as the papers say, and idle as much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError, PipelineError
from deepspeed.pipe.orders import OrderName, needs, order_of
from deepspeed.pipe.timeline import Costs, Timeline, ideal_bubble, ideal_makespan, simulate

TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0])  # exact in binary, so that sums can be compared


def _timeline(name: OrderName, stages: int, micro_batches: int, chunks: int, costs: Costs) -> Timeline:
    return simulate([order_of(name, stage, stages, micro_batches, chunks) for stage in range(stages)], costs)


@given(
    name=st.sampled_from(["1f1b", "gpipe", "interleaved", "inference"]),
    stages=st.integers(1, 6),
    more=st.integers(0, 9),
    chunks=st.sampled_from([1, 2, 4]),
    costs=st.builds(Costs, forward=TIMES, inputs=TIMES, weights=TIMES, transfer=st.just(0.0)),
)
def test_alike_stages_take_as_long_as_the_formula_says(
    name: OrderName, stages: int, more: int, chunks: int, costs: Costs
) -> None:
    chunks = chunks if name in ("interleaved", "inference") else 1
    timeline = _timeline(name, stages, stages + more, chunks, costs)
    assert timeline.makespan == ideal_makespan(name, stages, stages + more, chunks, costs)
    assert timeline.bubble == pytest.approx(ideal_bubble(name, stages, stages + more, chunks, costs))


@given(
    stages=st.integers(1, 6), more=st.integers(0, 9), forward=TIMES, inputs=TIMES, share=st.sampled_from([0.25, 0.5, 1.0])
)
def test_weights_that_are_put_off_fill_the_bubble(
    stages: int, more: int, forward: float, inputs: float, share: float
) -> None:
    costs = Costs(forward, inputs, share * min(forward, inputs))
    timeline = _timeline("zero_bubble", stages, stages + more, 1, costs)
    assert timeline.makespan == ideal_makespan("zero_bubble", stages, stages + more, 1, costs)


def test_the_bubble_of_1f1b_is_the_published_share() -> None:
    assert _timeline("1f1b", 4, 8, 1, Costs()).bubble == pytest.approx(3 / 11)
    assert ideal_bubble("gpipe", 2, 4, 1, Costs(1, 7, 2)) == pytest.approx(1 / 5)


@given(
    name=st.sampled_from(["1f1b", "gpipe", "interleaved", "zero_bubble"]),
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 9),
    costs=st.builds(Costs, forward=TIMES, inputs=TIMES, weights=TIMES, transfer=st.sampled_from([0.0, 0.5])),
)
def test_nothing_begins_before_what_it_needs_has_come(
    name: OrderName, stages: int, micro_batches: int, costs: Costs
) -> None:
    chunks = 3 if name == "interleaved" else 1
    timeline = _timeline(name, stages, micro_batches, chunks, costs)
    ends = {(stage, span.work): span.end for stage, spans in enumerate(timeline.spans) for span in spans}
    for stage, spans in enumerate(timeline.spans):
        before = 0.0
        for work, start, end in spans:
            assert before <= start < end
            before = end
            for place, other in needs(work, stage, stages, chunks):
                assert ends[place, other] + (costs.transfer if place != stage else 0) <= start


def test_stages_with_costs_of_their_own_wait_for_the_slowest() -> None:
    orders = [order_of("1f1b", stage, 2, 6) for stage in range(2)]
    timeline = simulate(orders, [Costs(1, 1, 1), Costs(2, 2, 2)])
    assert timeline.makespan == 1 + 6 * 6 + 2  # the slow stage never waits once it has begun
    assert timeline.live_peaks == [2, 1]
    with pytest.raises(ArgumentError, match="3 costs for 2 stages"):
        simulate(orders, [Costs()] * 3)


def test_orders_that_wait_for_each_other_have_no_timeline() -> None:
    first, last = order_of("1f1b", 0, 2, 2), order_of("1f1b", 1, 2, 2)
    with pytest.raises(PipelineError, match="for ever"):
        simulate([(first[0], first[2], first[1], first[3]), (last[0], last[2], last[1], last[3])], Costs())
