"""The arithmetic that turns runs into ratios and verdicts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.cases import (
    ORIGINAL,
    OURS,
    Case,
    Goal,
    Measured,
    Run,
    Spread,
    check_losses,
    goal_spread,
    merge,
)

positive = st.floats(0.001, 1000.0)


def case(**changes: object) -> Case:
    settings: dict[str, object] = {
        "title": "step",
        "benchmark": "train_step",
        "contenders": (OURS, "ddp", ORIGINAL),
        "figures": ("ms",),
        "of": "ddp",
        "loss_tolerance": 0.01,
        **changes,
    }
    return Case(**settings)  # type: ignore[arg-type]


def run(contender: str, pair: int, ms: float, loss: float | None = None) -> Run:
    losses = {} if loss is None else {"last": loss}
    return Run("step", contender, pair, 1.0, Measured({"ms": ms}, losses))


def test_the_order_of_contenders_turns_round_from_pair_to_pair() -> None:
    order = [list(case(pairs=2, side_pairs=2).contenders_in(pair)) for pair in range(3)]
    assert order == [[OURS, "ddp", ORIGINAL], [ORIGINAL, "ddp", OURS], []]


def test_contenders_that_no_goal_speaks_of_run_less_often() -> None:
    order = [list(case(pairs=3, side_pairs=1).contenders_in(pair)) for pair in range(3)]
    assert order == [[OURS, "ddp", ORIGINAL], ["ddp", OURS], [OURS, "ddp"]]


def test_a_number_on_the_command_line_holds_for_all_contenders() -> None:
    order = [list(case(pairs=1, side_pairs=0).contenders_in(pair, pairs=2)) for pair in range(3)]
    assert [len(names) for names in order] == [3, 3, 0]


def test_a_contender_that_a_goal_needs_runs_in_every_pair() -> None:
    with_goal = case(pairs=2, side_pairs=0, goals=(Goal("ms", 0.4, of=ORIGINAL),))
    assert set(with_goal.contenders_in(1)) == {OURS, "ddp", ORIGINAL}


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=9))
def test_ratios_are_taken_within_pairs(times: list[tuple[float, float]]) -> None:
    runs = [run(name, pair, ms) for pair, both in enumerate(times) for name, ms in zip((OURS, "ddp"), both, strict=True)]
    spread = goal_spread(Goal("ms", 1.0, of="ddp"), runs)
    assert spread == Spread.of([ours / ddp for ours, ddp in times])
    assert spread is not None
    assert spread.low <= spread.median <= spread.high


def test_a_drift_that_pairs_share_leaves_the_ratio_alone() -> None:
    runs = [run(name, pair, ms * (pair + 1)) for pair in range(4) for name, ms in ((OURS, 9.0), ("ddp", 10.0))]
    assert str(goal_spread(Goal("ms", 1.0, of="ddp"), runs)) == "0.9"


def test_an_overhead_is_counted_over_the_plain_loop_on_both_sides() -> None:
    pair = {OURS: {"ms": 12.0}, "plain": {"ms": 10.0}, ORIGINAL: {"ms": 15.0}}
    assert Goal("ms", 0.4, of=ORIGINAL, over="plain").value(pair) == pytest.approx(2.0 / 5.0)


def test_a_goal_without_a_divisor_is_about_the_figure_itself() -> None:
    assert Goal("ms", 0.1).value({OURS: {"ms": 0.07}}) == 0.07


@pytest.mark.parametrize("other", [{}, {ORIGINAL: {"ms": 10.0}}, {ORIGINAL: {"s": 20.0}}])
def test_a_pair_that_says_nothing_about_a_goal_has_no_value(other: dict[str, dict[str, float]]) -> None:
    pair = {OURS: {"ms": 12.0}, "plain": {"ms": 10.0}, **other}  # absent, no overhead at all, another figure
    assert Goal("ms", 0.4, of=ORIGINAL, over="plain").value(pair) is None


def test_a_failed_run_takes_only_its_own_pair_away() -> None:
    failed = Run("step", "ddp", 1, 1.0, error="RuntimeError: no")
    spread = goal_spread(Goal("ms", 1.0, of="ddp"), [run(OURS, 0, 1.0), run("ddp", 0, 2.0), run(OURS, 1, 9.0), failed])
    assert spread == Spread(0.5, 0.5, 0.5, 1)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=5))
def test_ranks_merge_to_the_worst_figure_and_the_mean_loss(ranks: list[tuple[float, float]]) -> None:
    merged = merge([Measured({"ms": ms}, {"last": loss}) for ms, loss in ranks])
    assert merged.figures["ms"] == max(ms for ms, _ in ranks)
    assert math.isclose(merged.losses["last"], sum(loss for _, loss in ranks) / len(ranks), rel_tol=1e-12)


@pytest.mark.parametrize(("loss", "is_fault"), [(4.0, False), (4.03, False), (4.05, True), (math.nan, True)])
def test_losses_that_differ_make_a_comparison_void(loss: float, is_fault: bool) -> None:
    check = check_losses(case(), [run(OURS, 0, 1.0, 4.0), run("ddp", 0, 1.0, loss)])
    assert (check.compared, bool(check.faults)) == (1, is_fault)


def test_a_loss_is_held_against_ours_of_the_same_pair_only() -> None:
    check = check_losses(case(), [run(OURS, 0, 1.0, 4.0), run("ddp", 1, 1.0, 8.0)])
    assert check.compared == 0


def test_an_exempt_loss_is_not_compared() -> None:
    exempt = case(loss_exempt=frozenset({(ORIGINAL, "last")}))
    assert check_losses(exempt, [run(OURS, 0, 1.0, 4.0), run(ORIGINAL, 0, 1.0, 5.0)]).compared == 0
