"""When an elastic job starts a host again. What it starts for real: tests/jobs/test_elastic_hosts.py."""

from __future__ import annotations

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher.arguments import parse_runner_args
from deepspeed.launcher.elastic_front import delay_seconds, run


def test_a_host_that_ends_again_and_again_is_tried_less_and_less_often() -> None:
    assert [delay_seconds(ends) for ends in (1, 2, 3, 4, 5, 6, 100)] == [2, 4, 8, 16, 30, 30, 30]


def test_back_ends_that_start_all_hosts_at_once_are_refused() -> None:
    args = parse_runner_args(["--elastic_training", "--launcher", "openmpi", "train.py"])
    with pytest.raises(LaunchError, match="--elastic_training with --launcher openmpi: needed pdsh, or --no_ssh"):
        run(args, {"a": [0], "b": [0]}, {}, {})
