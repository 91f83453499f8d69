"""What each update of ZenFlow does: as text, and as properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.zero.zenflow.schedule import MOST_WINDOW_STEPS, Progress, Rest, Schedule, Window, is_ripe, letters


def text(window: Window, updates: int, ripe: set[int] = frozenset()) -> str:  # type: ignore[assignment]
    return " ".join(letters(window, updates, lambda number: number in ripe))


def test_a_window_ends_with_the_rest() -> None:
    assert text(Window(2, 3, 6, is_behind=False), 10) == "F F CI I IR I I IR CI I"


def test_behind_training_the_last_window_before_a_choice_is_made_at_once() -> None:
    assert text(Window(0, 3, 9, is_behind=True), 10) == "CI I IB I I IB I I IR CI"


def test_a_choice_waits_for_the_end_of_a_window() -> None:
    assert text(Window(0, 3, 4, is_behind=False), 8) == "CI I IR I I IR CI I"


def test_an_interval_of_one_updates_everything_at_every_step() -> None:
    assert text(Window(1, 1, 3, is_behind=False), 6) == "F CIR IR IR CIR IR"


def test_the_automatic_window_ends_when_the_rest_is_ripe_or_a_choice_is_due() -> None:
    assert text(Window(0, None, 7, is_behind=False), 9, {2, 3}) == "CI IR IR I I I IR CI I"


def test_the_automatic_window_has_a_longest_length() -> None:
    made = text(Window(0, None, 1000, is_behind=True), 2 * MOST_WINDOW_STEPS).split()
    assert [number for number, each in enumerate(made, 1) if "B" in each] == [MOST_WINDOW_STEPS, 2 * MOST_WINDOW_STEPS]


windows = st.builds(
    Window,
    warm_up=st.integers(0, 4),
    length=st.none() | st.integers(1, 6),
    choice_every=st.integers(1, 20),
    is_behind=st.booleans(),
)


@given(window=windows, updates=st.integers(1, 80), ripe=st.sets(st.integers(1, 80)))
def test_every_gradient_is_summed_into_one_window_of_one_choice(window: Window, updates: int, ripe: set[int]) -> None:
    made = text(window, updates, ripe).split()
    assert made[: window.warm_up] == ["F"] * min(window.warm_up, updates)
    in_window, is_behind = 0, False
    for each in made[window.warm_up :]:
        if "C" in each:
            assert in_window == 0, "a choice inside a window"
            assert not is_behind, "a choice while an update runs behind"
        in_window += 1
        if each[-1] in "RB":
            assert window.length in (None, in_window)
            in_window, is_behind = 0, each[-1] == "B"
        assert in_window < (window.length or MOST_WINDOW_STEPS)
    assert window.is_behind or "B" not in "".join(made)
    assert "C" in made[window.warm_up] if updates > window.warm_up else True


@given(window=windows, updates=st.integers(1, 40), cut=st.integers(0, 40))
def test_a_schedule_goes_on_from_its_progress(window: Window, updates: int, cut: int) -> None:
    whole, second = Schedule(window), Schedule(window)
    for number in range(updates):
        if number == cut:
            second = Schedule(window, Progress(**vars(second.progress)))
        assert (whole.is_full, whole.chooses) == (second.is_full, second.chooses)
        for schedule in (whole, second):
            schedule.full() if schedule.is_full else schedule.finish()
        assert whole.progress == second.progress


def test_the_rest_is_ripe_when_its_elements_weigh_as_much_as_important_ones() -> None:
    assert is_ripe(90.0, 90, 10.0, 10, 1.0)
    assert not is_ripe(80.0, 90, 10.0, 10, 1.0)
    assert is_ripe(23.0, 90, 10.0, 10, 0.5)  # (1 / 2)**2 of 90 is 22.5
    assert not is_ripe(math.nan, 90, 10.0, 10, 0.5)


def test_without_rest_or_without_matrices_every_window_ends_at_once() -> None:
    assert is_ripe(0.0, 0, 1.0, 10, 0.99)
    assert is_ripe(0.0, 0, 0.0, 0, 0.99)


@pytest.mark.parametrize("rest", list(Rest))
def test_the_letters_are_those_of_the_picture(rest: Rest) -> None:
    assert rest.value in ("", "R", "B")
