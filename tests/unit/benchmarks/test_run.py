"""What `benchmarks/run.py` plans, and what its tables say, without running a benchmark."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.harness.cases import AGAIN, ORIGINAL, OURS, Measured, Run
from benchmarks.harness.report import as_json, case_lines
from benchmarks.run import choose, plan, schedule, warm_ups, with_contenders


def options(**changes: object) -> argparse.Namespace:
    given = {"only": [], "peer": "python", "noise": False, "cold": False, "slow_bf16": False, **changes}
    return argparse.Namespace(**given)


def test_only_takes_cases_by_the_beginning_of_their_title() -> None:
    titles = [case.title for case in choose(["overhead stage 3", "import"])]
    assert titles == ["import", "overhead stage 3", "overhead stage 3 every layer sharded"]


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SystemExit, match=r"'overheads': no such benchmark.*overhead fp32"):
        choose(["overheads"])


def test_titles_are_unique_because_runs_are_found_by_them() -> None:
    titles = [case.title for case in choose([])]
    assert len(set(titles)) == len(titles)


def test_cases_ruled_by_emulated_bf16_are_left_out_and_named() -> None:
    cases, notes = plan(options(), slowdown=lambda: 40.0)
    assert not any(case.multiplies_bf16 for case in cases)
    assert any("train_step bf16 accumulation 1" in note and "40 times" in note for note in notes)


@pytest.mark.parametrize(("slow_bf16", "slowdown"), [(False, 1.2), (True, 40.0)])
def test_bf16_runs_where_hardware_has_it_or_the_user_insists(slow_bf16: bool, slowdown: float) -> None:
    cases, notes = plan(options(slow_bf16=slow_bf16), slowdown=lambda: slowdown)
    assert any(case.multiplies_bf16 for case in cases)
    assert notes == []


def test_without_an_interpreter_the_original_is_left_out_and_that_is_said() -> None:
    cases, notes = plan(options(peer=None), slowdown=lambda: 1.0)
    assert all(ORIGINAL not in case.contenders for case in cases)
    assert len(notes) == 1
    assert "left out: original" in notes[0]


def test_the_original_compiles_what_the_chosen_cases_need_before_the_first_pair() -> None:
    def titles(*only: str, has_peer: bool = True) -> list[str]:
        return [case.title for case in warm_ups([with_contenders(case, has_peer=has_peer) for case in choose(only)])]

    always = ["initialize warm-up fp32", "initialize warm-up bf16"]
    assert titles("overhead fp32") == always
    assert titles("offload_step nvme", "overhead fp32") == [*always, "offload_step nvme, warm-up"]
    assert titles("offload_step", has_peer=False) == []


def test_noise_runs_ours_twice_in_a_pair() -> None:
    case = with_contenders(choose(["import"])[0], has_peer=True, noise=True)
    assert list(case.contenders_in(0)) == [OURS, AGAIN, ORIGINAL]


def test_runs_of_one_pair_follow_each_other_and_pairs_go_over_all_cases() -> None:
    planned = [(pair, case.title, name) for pair, case, name in schedule(choose(["overhead fp32", "import"]), 2)]
    assert planned == [
        (0, "import", OURS),
        (0, "import", ORIGINAL),
        (0, "overhead fp32", OURS),
        (0, "overhead fp32", "plain"),
        (0, "overhead fp32", ORIGINAL),
        (1, "import", ORIGINAL),
        (1, "import", OURS),
        (1, "overhead fp32", ORIGINAL),
        (1, "overhead fp32", "plain"),
        (1, "overhead fp32", OURS),
    ]


def _runs(ours: float, original: float) -> list[Run]:
    return [
        Run("import", name, 0, 1.0, Measured({"import_cpu_s": seconds}))
        for name, seconds in ((OURS, ours), (ORIGINAL, original))
    ]


@pytest.mark.parametrize(("seconds", "verdict"), [(0.05, "met"), (0.2, "MISSED")])
def test_a_table_says_whether_its_goal_is_met(seconds: float, verdict: str) -> None:
    text = "\n".join(case_lines(choose(["import"])[0], _runs(seconds, 0.4)))
    assert text.rstrip().endswith(verdict)
    assert f"{seconds / 0.4:.4g}" in text


def test_a_table_shows_why_a_contender_has_no_figures() -> None:
    failed = Run("import", ORIGINAL, 0, 1.0, error="ImportError: no module")
    text = "\n".join(case_lines(choose(["import"])[0], [_runs(0.05, 0.4)[0], failed]))
    assert "FAILED: ImportError: no module" in text


def test_the_json_holds_the_runs_and_what_the_tables_show() -> None:
    data = json.loads(json.dumps(as_json(choose(["import"]), _runs(0.05, 0.4), {"cores": 2}, ["a note"])))
    assert data["cases"][0]["goals"][0]["measured"]["median"] == 0.05
    assert len(data["runs"]) == 2
    assert data["notes"] == ["a note"]
