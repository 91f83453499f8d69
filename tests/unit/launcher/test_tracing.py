"""The wish for traces: from the command line to the ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from deepspeed.launcher.arguments import parse_runner_args
from deepspeed.launcher.restarts import restarts
from deepspeed.launcher.runner import _tracing
from deepspeed.launcher.tracing import Tracing, steps_of


@pytest.mark.parametrize(("text", "steps"), [("5-7", (5, 7)), ("3", (3, 3)), ("1-1", (1, 1))])
def test_steps_are_a_range_or_one_number(text: str, steps: tuple[int, int]) -> None:
    assert steps_of(text) == steps


@pytest.mark.parametrize("text", ["0-2", "7-5", "a", "3-", "-3", "", "1-2-3"])
def test_other_steps_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 5-7"):
        steps_of(text)


def test_the_flag_becomes_a_variable_that_ranks_read() -> None:
    args = parse_runner_args(["--profile-steps", "5-7", "--profile-folder", "traces", "train.py", "--profile-steps", "9"])
    assert args.user_args == ["--profile-steps", "9"]  # behind the script it is the script's own
    environ = _tracing(args)
    assert list(environ) == ["DEEPSPEED_PROFILE"]
    assert Tracing.from_environ(environ) == Tracing(5, 7, str(Path("traces").absolute()))
    assert _tracing(parse_runner_args(["train.py"])) == {}
    assert Tracing.from_environ({}) is None


def test_restarts_are_what_an_elastic_launcher_says() -> None:
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    assert restarts({}) == restarts({"TORCHELASTIC_RESTART_COUNT": ""}) == 0
