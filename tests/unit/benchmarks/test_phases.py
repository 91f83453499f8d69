"""A profile becomes phases: nothing is lost, nothing is counted twice, and each function's time goes where its rule says."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.phases import OTHER, Function, Phases, Stats, by_function, rule_of, table

FORWARD = ("/tree/benchmarks/profile_step.py", 1, "_forward")
REDUCER = ("/tree/deepspeed/zero/reducer.py", 5, "launch")
MASTER = ("/tree/deepspeed/zero/master.py", 7, "step")
CALL = ("/env/site-packages/torch/module.py", 9, "_call_impl")
LAYER = ("/env/site-packages/torch/linear.py", 11, "forward")
COPY = ("~", 0, "<method 'copy_' of 'TensorBase' objects>")
AUTOGRAD = ("~", 0, "<method 'run_backward' of 'torch._C._EngineBase' objects>")


def stats_of(*rows: tuple[Function, float, float, dict[Function, tuple[float, float]]]) -> Stats:
    """(function, own, cumulative, {caller: (own, cumulative) from there}) in the form of pstats."""
    return {f: (1, 1, own, cum, {c: (1, 1, *edge) for c, edge in callers.items()}) for f, own, cum, callers in rows}


def test_the_first_rule_that_fits_counts() -> None:
    assert rule_of(("/x/deepspeed/zero/master.py", 1, "rewriting")) == "gather"
    assert rule_of(MASTER) == "walk"
    assert rule_of(AUTOGRAD) == "backward"
    assert rule_of(COPY) is None


def test_a_function_without_rule_gives_its_time_to_those_who_asked_for_it() -> None:
    stats = stats_of(
        (REDUCER, 1.0, 4.0, {}),
        (MASTER, 2.0, 3.0, {}),
        (COPY, 4.0, 4.0, {REDUCER: (3.0, 3.0), MASTER: (1.0, 1.0)}),
    )
    seconds = Phases(stats).seconds()
    assert (seconds["reduce"], seconds["walk"]) == pytest.approx((4.0, 3.0))


def test_modules_within_modules_go_to_the_forward_that_called_the_outermost() -> None:
    stats = stats_of(
        (FORWARD, 0.0, 10.0, {}),
        (CALL, 1.0, 10.0, {FORWARD: (0.1, 10.0), LAYER: (0.9, 9.0)}),  # a layer that calls a layer
        (LAYER, 9.0, 9.9, {CALL: (9.0, 9.9)}),
    )
    seconds = Phases(stats).seconds()
    assert seconds["forward"] == pytest.approx(10.0)
    assert seconds[OTHER] == pytest.approx(0.0, abs=1e-6)


def test_a_circle_that_nobody_enters_is_other_and_not_lost() -> None:
    stats = stats_of((CALL, 1.0, 2.0, {LAYER: (1.0, 2.0)}), (LAYER, 1.0, 2.0, {CALL: (1.0, 2.0)}))
    assert Phases(stats).seconds()[OTHER] == pytest.approx(2.0)


def test_rows_hold_the_c_functions_that_a_function_calls_and_short_places() -> None:
    stats = stats_of((REDUCER, 1.0, 4.0, {}), (AUTOGRAD, 2.0, 6.0, {}), (COPY, 3.0, 3.0, {REDUCER: (3.0, 3.0)}))
    rows = by_function(stats, "/tree")
    assert [(row.place, row.phase, row.seconds) for row in rows] == [
        ("deepspeed/zero/reducer.py:5 launch", "reduce", 4.0),
        ("method 'run_backward' of 'torch._C._EngineBase' objects", "backward", 2.0),
    ]


def _deep(levels: int) -> int:
    return sorted([levels, 0])[-1] if levels == 0 else _deep(levels - 1) + len(str(levels))


def _profiled(call: Callable[[], object]) -> Any:
    profile = cProfile.Profile()
    profile.runcall(call)
    return pstats.Stats(profile).stats  # type: ignore[attr-defined]


def test_phases_and_rows_both_add_up_to_a_real_profile() -> None:
    stats = _profiled(lambda: [_deep(60) for _ in range(50)])
    whole = sum(own for _, _, own, _, _ in stats.values())
    assert sum(Phases(stats).seconds().values()) == pytest.approx(whole, rel=1e-6)
    assert sum(row.seconds for row in by_function(stats, "/")) == pytest.approx(whole, rel=1e-6)


def test_a_table_is_per_step_and_ends_with_the_slowest_functions() -> None:
    stats = stats_of((REDUCER, 1.0, 1.0, {}), (MASTER, 3.0, 3.0, {}))
    lines = list(table(Phases(stats).seconds(), by_function(stats, "/tree"), steps=2, count=1))
    assert any(line.split() == ["walk", "1500.00", "75.0%"] for line in lines)
    assert lines[-1].split() == ["walk", "1500.00", "0", "deepspeed/zero/master.py:7", "step"]
