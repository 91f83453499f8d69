"""`deepspeed.zero.trace`: the order of uses, recorded and foreseen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.zero.trace import Trace


def _trace(*sequence: int, numels: tuple[int, ...] = (10, 20, 30, 40), wraps: bool = False) -> Trace:
    trace = Trace(numels, wraps=wraps)
    for unit in sequence:
        trace.use(unit)
    trace.close()
    return trace


def test_nothing_is_foreseen_before_a_pass_was_recorded() -> None:
    trace = Trace((10, 20))
    trace.use(0)
    assert not trace.is_known
    assert trace.length == 0
    assert trace.next_place(1) is None
    assert trace.distance(0) is None
    assert not trace.was_used(0)


def test_what_is_forgotten_in_the_middle_of_a_pass_is_recorded_anew() -> None:
    trace = _trace(0, 1, 2)
    trace.use(0)
    trace.forget()
    assert (trace.is_known, trace.length, trace.position, trace.next_place(1)) == (False, 0, -1, None)
    for unit in (3, 1):
        trace.use(unit)
    assert trace.close() is False  # the first pass differs from nothing
    assert [trace.unit_at(place) for place in range(trace.length)] == [3, 1]


def test_the_distance_is_what_other_uses_need_before_the_next_one() -> None:
    trace = _trace(0, 1, 2, 2, 1, 0)
    assert trace.length == 6
    trace.use(0)
    assert trace.distance(0) == 20 + 30 + 30 + 20
    assert trace.distance(1) == 0
    trace.use(1)
    assert trace.distance(1) == 60
    trace.use(2)
    assert trace.distance(2) == 0
    assert trace.was_used(1)
    assert not trace.was_used(3)
    trace.use(2)
    assert trace.distance(2) is None
    assert trace.differences == 0
    assert trace.next_place(0) == 5
    assert trace.unit_at(5) == 0
    assert trace.distance_to(5) == 20


def test_a_pass_that_repeats_with_the_same_values_is_used_again_after_its_end() -> None:
    trace = _trace(0, 1, 2, wraps=True)
    trace.use(0)
    assert trace.distance(0) == 50
    trace.use(1)
    trace.use(2)
    assert trace.distance(1) == 10
    assert trace.distance(3) is None
    assert _trace(0, 1, 2).distance(0) == 0


def test_a_use_that_was_left_out_moves_the_position_on() -> None:
    trace = _trace(0, 1, 2, 3)
    trace.use(0)
    trace.use(2)
    assert trace.position == 2
    assert trace.distance(3) == 0
    assert trace.differences == 1


def test_a_use_that_was_not_expected_leaves_the_position() -> None:
    trace = _trace(0, 1, 2)
    trace.use(0)
    trace.use(3)
    assert trace.position == 0
    trace.use(1)
    assert trace.position == 1
    assert trace.differences == 1


def test_close_tells_whether_the_order_changed_and_learns_the_new_one() -> None:
    trace = Trace((1, 1, 1))
    assert not trace.close()
    for sequence, has_changed in (([0, 1], False), ([0, 1], False), ([1, 0], True), ([1, 0], False), ([1], True)):
        for unit in sequence:
            trace.use(unit)
        assert trace.close() is has_changed
        assert [trace.unit_at(place) for place in range(trace.length)] == sequence
    assert not trace.close()  # nothing was used: nothing is learned
    assert trace.length == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_a_repeated_pass_is_foreseen_exactly(sequence: list[int]) -> None:
    numels = (10, 20, 30, 40)
    trace = _trace(*sequence)
    for place, unit in enumerate(sequence):
        trace.use(unit)
        assert trace.position == place
        rest = sequence[place + 1 :]
        expected = sum(numels[other] for other in rest[: rest.index(unit)]) if unit in rest else None
        assert trace.distance(unit) == expected
    assert trace.differences == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_any_other_order_is_followed_without_losing_the_place(first: list[int], second: list[int]) -> None:
    trace = _trace(*first)
    before = -1
    for unit in second:
        trace.use(unit)
        assert before <= trace.position < len(first)
        before = trace.position
    assert trace.close() is (first != second)
