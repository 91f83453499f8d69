"""Records become strict JSON, one line each."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import PurePosixPath

import pytest
import torch

from deepspeed import run_log
from deepspeed.run_log import Checkpoint, CommSums, End, RankStep, Schedule, Step, line_of


def _step(**values: object) -> Step:
    known = {each.name: None for each in fields(Step)} | {"step": 3, "samples": 12, "lr": [0.5], "skipped": 0, "more": {}}
    return Step(**{**known, **values})  # type: ignore[arg-type]


def test_a_line_has_the_kind_the_time_and_every_field() -> None:
    record = Checkpoint("save", "global_step3", 3, 0.25, 1024, is_async=True)
    assert json.loads(line_of(record, 1.5)) == {
        "kind": "checkpoint",
        "time": 1.5,
        "action": "save",
        "tag": "global_step3",
        "step": 3,
        "seconds": 0.25,
        "nbytes": 1024,
        "is_async": True,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_null(value: float) -> None:
    line = line_of(_step(loss=value, more={"aux": value}), 0.0)
    read = json.loads(line, parse_constant=pytest.fail)
    assert (read["loss"], read["more"], read["lr"]) == (None, {"aux": None}, [0.5])


def test_nested_records_are_objects_and_tuples_are_lists() -> None:
    record = RankStep(1, 2, None, None, {"forward": 0.5}, {"all_reduce": CommSums(2, 8, 0.25)}, 0.125)
    read = json.loads(line_of(record, 0.0))
    assert read["comm"] == {"all_reduce": {"count": 2, "nbytes": 8, "seconds": 0.25}}
    assert read["device_bytes"] is None
    drawn = Schedule("1f1b", 2, 1, "stage 0  F0\nstage 1", ((0, 0.0, 0.5, "F", 0),), 0.5)
    read = json.loads(line_of(drawn, 0.0))
    assert read["works"] == [[0, 0.0, 0.5, "F", 0]]
    assert "\n" not in line_of(drawn, 0.0)  # the text's own line ends are escaped


def test_values_of_other_types_are_shown_as_text() -> None:
    more = {"path": PurePosixPath("a/b"), "dtype": torch.float16, "f64": torch.tensor(0.5, dtype=torch.float64).numpy()[()]}
    assert json.loads(line_of(_step(more=more), 0.0))["more"] == {"path": "a/b", "dtype": "torch.float16", "f64": 0.5}


def test_kinds_are_those_that_readers_know() -> None:
    kinds = {getattr(run_log, name).kind for name in run_log.__all__ if hasattr(getattr(run_log, name), "kind")}
    kinds.discard(getattr(run_log.Record, "kind", None))
    assert kinds == {"start", "step", "rank_step", "experts", "schedule", "checkpoint", "profile", "end"}
    assert json.loads(line_of(End(7, "done"), 0.0))["cause"] == "done"
