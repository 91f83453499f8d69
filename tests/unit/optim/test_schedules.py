"""The five schedules on real torch optimizers: reference rows, groups, state and refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.optim import schedules
from deepspeed.optim.schedules import LRRangeTest, OneCycle, Schedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

Make = Callable[[torch.optim.Optimizer], Schedule]


def optimizer(*rates: float, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> torch.optim.Optimizer:
    return kind([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (1.0,)])


def rates_over(schedule: Schedule, optim: torch.optim.Optimizer, steps: int) -> list[float]:
    seen = [optim.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        seen.append(optim.param_groups[0]["lr"])
    return seen


LINEAR: dict[str, Any] = {"warmup_num_steps": 4, "warmup_type": "linear"}
ROWS: dict[str, tuple[Make, list[float]]] = {
    "WarmupLR log": (
        lambda o: WarmupLR(o, warmup_max_lr=1, warmup_num_steps=4),
        [0, 0, 0.5, 0.7924813, 1, 1, 1],
    ),
    "WarmupLR linear": (lambda o: WarmupLR(o, warmup_max_lr=1, **LINEAR), [0, 0, 0.25, 0.5, 0.75, 1, 1]),
    "WarmupDecayLR": (
        lambda o: WarmupDecayLR(o, 8, warmup_min_lr=0.1, warmup_max_lr=1, **LINEAR),
        [0.1, 0.1, 0.325, 0.55, 0.775, 1, 0.775, 0.55, 0.325, 0.1, 0.1],
    ),
    "WarmupCosineLR": (
        lambda o: WarmupCosineLR(o, 8, cos_min_ratio=0.1, **LINEAR),
        [0, 0, 0.25, 0.5, 0.75, 0.8681981, 0.55, 0.2318019, 0.1, 0.1, 0.1],
    ),
    "LRRangeTest": (lambda o: LRRangeTest(o, 0.1, 2, 1.0), [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
    "LRRangeTest staircase": (lambda o: LRRangeTest(o, 0.1, 2, 1.0, True), [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]),
    "OneCycle": (
        lambda o: OneCycle(o, 0.1, 1, 0.5, 3, 3, decay_step_size=2, decay_mom_rate=0.1),
        [0.1, 0.4, 0.7, 1, 0.7, 0.4, 0.1, 0.08, 0.0666667, 0.0571429, 0.05],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_rates_equal_the_reference_row(row: str) -> None:
    make, want = ROWS[row]
    optim = optimizer()
    # The rows are given to seven digits.
    assert rates_over(make(optim), optim, len(want) - 1) == pytest.approx(want, abs=5e-8)


def test_one_cycle_moves_the_first_beta_against_the_rate() -> None:
    optim = optimizer()
    schedule = OneCycle(optim, 0.1, 1, 0.5, 3, 3, decay_step_size=2, decay_mom_rate=0.1)
    seen = [optim.param_groups[0]["betas"]]
    for _ in range(10):
        schedule.step()
        seen.append(optim.param_groups[0]["betas"])
    want = [0.8, 0.8667, 0.8333, 0.8, 0.8333, 0.8667, 0.9, 0.945, 0.99, 1.035, 1.08]
    assert [beta1 for beta1, _ in seen] == pytest.approx(want, abs=5e-5)
    assert {beta2 for _, beta2 in seen} == {0.99}
    assert schedule.get_mom() == [seen[-1][0]]


def test_one_cycle_climbs_in_stairs() -> None:
    optim = optimizer()
    schedule = OneCycle(optim, 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2, cycle_momentum=False)
    assert rates_over(schedule, optim, 8) == [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]
    assert schedule.get_mom() == []


@pytest.fixture
def messages() -> Iterator[list[str]]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    schedules.logger.addHandler(handler)
    yield seen
    schedules.logger.removeHandler(handler)


def test_one_cycle_says_that_an_optimizer_has_no_momentum_to_cycle(messages: list[str]) -> None:
    optim = optimizer(kind=torch.optim.SGD)
    rates = rates_over(OneCycle(optim, 0.1, 1.0, cycle_first_step_size=2), optim, 2)
    assert rates == pytest.approx([0.1, 0.55, 1.0])
    assert "betas" not in optim.param_groups[0]
    assert any("SGD has no betas" in message for message in messages)


def test_an_unknown_warmup_shape_falls_back_to_log_and_says_so(messages: list[str]) -> None:
    optim = optimizer()
    schedule = WarmupLR(optim, warmup_max_lr=1, warmup_num_steps=4, warmup_type="cubic")
    assert rates_over(schedule, optim, 2)[-1] == pytest.approx(0.5)
    assert any("'cubic'" in message for message in messages)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: WarmupLR(o, warmup_num_steps=3),
        lambda o: WarmupLR(o, [0, 0], [0.1, 0.01], 3),
        lambda o: WarmupDecayLR(o, 100, 0.0, [0.1, 0.01], 3),
        lambda o: WarmupCosineLR(o, 100, warmup_num_steps=3),
        lambda o: LRRangeTest(o, [0.1, 0.01], 5),
        lambda o: OneCycle(o, [0.1, 0.01], [1.0, 0.1], cycle_first_step_size=3),
    ],
)
def test_each_group_keeps_its_own_rate(make: Make) -> None:
    optim = optimizer(0.1, 0.01)
    schedule = make(optim)
    for _ in range(8):
        schedule.step()
        first, second = (group["lr"] for group in optim.param_groups)
        assert first == pytest.approx(10 * second)
        assert schedule.get_lr() == schedule.get_last_lr() == [first, second]
    assert first > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda o: WarmupLR(o, [0.0], 0.1),
        lambda o: WarmupDecayLR(o, 10, 0.0, [0.1, 0.1, 0.1]),
        lambda o: LRRangeTest(o, [0.1]),
        lambda o: OneCycle(o, [0.1], 1.0),
        lambda o: OneCycle(o, 0.1, []),
    ],
)
def test_a_list_of_the_wrong_length_names_key_and_counts(make: Make) -> None:
    with pytest.raises(ValueError, match=r"_lr=.* values for 2 parameter groups"):
        make(optimizer(0.1, 0.01))


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LRRangeTest(o, lr_range_test_step_size=0),
        lambda o: LRRangeTest(o, lr_range_test_step_size=True),
        lambda o: OneCycle(o, 0.1, 1, cycle_first_step_size=0),
        lambda o: OneCycle(o, 0.1, 1, cycle_second_step_size=-1),
        lambda o: OneCycle(o, 0.1, 1, decay_step_size=-2),
        lambda o: WarmupLR(o, warmup_num_steps=-1),
        lambda o: WarmupLR(o, warmup_num_steps=2.5),
        lambda o: WarmupDecayLR(o, 0),
        lambda o: WarmupCosineLR(o, "ten"),
        lambda o: WarmupCosineLR(o, float("nan")),
    ],
)
def test_senseless_step_counts_are_refused_with_what_is_needed(make: Make) -> None:
    with pytest.raises(ValueError, match=r"(step_size|num_steps)=.* a whole number of steps, at least \d, is needed"):
        make(optimizer())


def test_no_warmup_runs_at_the_full_rate_from_the_start() -> None:
    optim = optimizer(0.5)
    assert rates_over(WarmupLR(optim, warmup_num_steps=0), optim, 2) == [0.5, 0.5, 0.5]


def test_a_wrapper_that_holds_the_optimizer_is_accepted() -> None:
    optim = optimizer(0.2)
    schedule = WarmupLR(SimpleNamespace(optimizer=optim), warmup_num_steps=2, warmup_type="linear")
    assert rates_over(schedule, optim, 3) == pytest.approx([0, 0, 0.1, 0.2])


def test_something_else_than_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer is a dict; a schedule needs a torch.optim.Optimizer"):
        WarmupLR({})


@given(row=st.sampled_from(sorted(ROWS)), before=st.integers(0, 9), after=st.integers(0, 9))
def test_a_loaded_schedule_continues_the_rates_without_a_break(row: str, before: int, after: int) -> None:
    make = ROWS[row][0]
    optim, resumed = optimizer(), optimizer()
    whole = make(optim)
    for _ in range(before):
        whole.step()
    state = whole.state_dict()
    assert state == {"last_batch_iteration": before - 1}
    schedule = make(resumed)
    schedule.load_state_dict(state)
    assert schedule.get_last_lr() == whole.get_last_lr() == [resumed.param_groups[0]["lr"]]
    for _ in range(after):
        whole.step()
        schedule.step()
    assert resumed.param_groups[0]["lr"] == optim.param_groups[0]["lr"]
    assert resumed.param_groups[0]["betas"] == optim.param_groups[0]["betas"]


def test_a_schedule_may_be_built_at_or_moved_to_any_step() -> None:
    optim = optimizer()
    schedule = WarmupLR(optim, 0.0, 1.0, 4, "linear", last_batch_iteration=1)
    assert optim.param_groups[0]["lr"] == 0.25
    schedule.step(3)
    assert schedule.get_lr() == [0.75]


def test_a_group_added_behind_the_schedules_back_is_named() -> None:
    optim = optimizer()
    schedule = WarmupLR(optim)
    optim.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"2 parameter groups, the schedule was made for 1"):
        schedule.step()


def test_rates_before_the_first_step_are_those_of_the_start() -> None:
    assert WarmupLR(optimizer(), 0.3, 1.0).get_last_lr() == [0.3]
