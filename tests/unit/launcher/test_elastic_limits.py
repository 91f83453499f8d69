"""How few and how many hosts, on the command line."""

from __future__ import annotations

import argparse

import pytest

from deepspeed.launcher.arguments import parse_launch_args, parse_runner_args
from deepspeed.launcher.elastic_limits import limits_of
from deepspeed.launcher.hostfile import ResourceError


def parsed(words: str) -> argparse.Namespace:
    return parse_runner_args(words.split())


def test_the_flag_alone_takes_one_to_all() -> None:
    args = parsed("--elastic_training train.py --lr 1")
    assert (args.user_script, args.user_args) == ("train.py", ["--lr", "1"])
    assert limits_of(args, 4) == (1, 4)


@pytest.mark.parametrize(
    "words",
    [
        "--elastic_training 2:3 train.py --lr 1",
        "--elastic_training 2:3 -H hosts train.py --lr 1",
        "-H hosts --elastic_training 2:3 -- train.py --lr 1",
        "--elastic_training --min_elastic_nodes 2 --max_elastic_nodes 3 train.py --lr 1",
    ],
)
def test_limits_may_stand_behind_the_flag_or_have_their_own(words: str) -> None:
    args = parsed(words)
    assert (args.elastic_training, args.user_script, args.user_args) == (True, "train.py", ["--lr", "1"])
    assert limits_of(args, 4) == (2, 3)


def test_what_looks_like_limits_among_the_scripts_words_stays_there() -> None:
    args = parsed("--elastic_training train.py --elastic_training 1:2")
    assert args.user_args == ["--elastic_training", "1:2"]
    assert (args.min_elastic_nodes, args.max_elastic_nodes) == (-1, -1)
    assert parsed("train.py 1:2").user_args == ["1:2"]


def test_limits_without_a_script_are_a_wrong_command_line() -> None:
    with pytest.raises(SystemExit):
        parsed("--elastic_training 1:2")


@pytest.mark.parametrize("limits", ["3:2", "0:2", "1:5"])
def test_limits_that_contradict_each_other_or_the_hosts_are_refused(limits: str) -> None:
    with pytest.raises(ResourceError, match=r"needed 1 <= MIN <= MAX <= 4"):
        limits_of(parsed(f"--elastic_training {limits} train.py"), 4)


def test_a_negative_number_of_restarts_is_refused() -> None:
    with pytest.raises(ResourceError, match="--max_restarts -1"):
        limits_of(parsed("--elastic_training --max_restarts -1 train.py"), 4)


def test_the_launcher_of_a_host_takes_them_as_well() -> None:
    words = "--enable_elastic_training --min_elastic_nodes=1 --max_elastic_nodes=3 --max_restarts=5 train.py"
    args = parse_launch_args(words.split())
    assert (args.enable_elastic_training, args.min_elastic_nodes, args.max_elastic_nodes, args.max_restarts) == (
        True,
        1,
        3,
        5,
    )
