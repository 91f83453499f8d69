"""Elastic jobs on three hosts out of namespaces: hosts are killed, cut off and booted again while the job runs.

The reference of the training is one process that is never interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hosts import Hosts, hosts, inner
from tests.support.launching import ROOT, Job

EXAMPLE = ROOT / "examples" / "elastic" / "train.py"
STEPS = 70
ENDED_SECONDS = 5.0

WAITING = """
import os, pathlib, sys, time
name = f"{os.environ['RANK']}of{os.environ['WORLD_SIZE']}"
pathlib.Path(name).write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
if sys.argv[-1] == "fail" and os.environ["RANK"] == "1":
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with hosts(3, slots=1) as cluster:
        yield cluster


@pytest.fixture
def cluster(three: Hosts) -> Iterator[Hosts]:
    yield three
    three.reset()


def start(cluster: Hosts, folder: Path, *words: str, on: int = 1) -> Job:
    """The command of the user, run on one of the hosts."""
    command = cluster[on].command(sys.executable, "-m", "deepspeed.launcher.runner", folder=folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return Job(folder, ["-H", str(cluster.hostfile), *words], {"PATH": path}, command=command)


def until(claim: Callable[[], bool], job: Job, what: str, seconds: float = 45.0) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {what}; output:\n{job.output}"
        time.sleep(0.05)


def records(run: Path) -> list[dict[str, Any]]:
    path = run / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _command_line(process: psutil.Process) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def assert_gone(cluster: Hosts, since: float, seconds: float = ENDED_SECONDS) -> None:
    def left() -> list[list[str]]:
        found = [process for host in cluster for process in host.jobs()]
        return [told for process in found if (told := _command_line(process))]

    while left() and time.monotonic() < since + seconds:
        time.sleep(0.05)
    assert not left()


def test_three_hosts_then_two_then_three_train_as_one_process_that_never_stopped(cluster: Hosts, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, run):
        folder.mkdir()
    alone = [sys.executable, str(EXAMPLE), "--run", str(whole), "--steps", str(STEPS)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    reference = subprocess.Popen(alone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    words = [
        "--elastic_training",
        "1:3",
        str(EXAMPLE),
        "--run",
        str(run),
        "--steps",
        str(STEPS),
        "--seconds-per-step",
        "0.4",
    ]
    with start(cluster, tmp_path, *words) as job:
        until(lambda: len(records(run)) >= 8, job, "three hosts have made steps")
        cluster[3].kill()
        until(lambda: records(run)[-1]["ranks"] == 2, job, "two hosts go on")
        cluster[3].boot()
        until(lambda: records(run)[-1]["ranks"] == 3, job, "three hosts go on")
        assert job.wait(60) == 0, job.output
        assert_gone(cluster, time.monotonic())
        assert "host node3 is lost" in job.output
    assert reference.wait(60) == 0
    wanted = records(whole)
    seen = records(run)
    assert {record["ranks"] for record in seen} == {2, 3}
    assert [record["step"] for record in wanted] == sorted({record["step"] for record in seen})
    for record in seen:  # those made again after a checkpoint included
        same = wanted[record["step"] - 1]
        assert record["samples"] == same["samples"]
        assert record["loss"] == pytest.approx(same["loss"], rel=1e-9)
    restarts = [after for before, after in pairwise(seen) if after["ranks"] != before["ranks"]]
    assert all(record["step"] % 5 == 1 for record in restarts)  # behind a checkpoint, the first step after it


def test_a_job_that_gives_up_ends_on_all_hosts_with_the_status_of_its_rank(cluster: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    with start(cluster, tmp_path, "--elastic_training", "--max_restarts", "0", "script.py", "fail") as job:
        assert job.wait(60) == 7, job.output
        assert_gone(cluster, time.monotonic())
        assert "rank 1 on host node2 failed first, with exit status 7" in job.output
        assert "[rank 1] about to fail" in job.output


def test_the_loss_of_the_first_host_is_settled_and_ends_the_job(cluster: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    with start(cluster, tmp_path, "--elastic_training", "script.py", "wait", on=2) as job:
        until(lambda: all((tmp_path / f"{rank}of3").exists() for rank in range(3)), job, "three ranks run")
        killed = time.monotonic()
        cluster[1].kill()
        assert job.wait(30) == 255, job.output
        assert_gone(cluster, killed, 15.0)
        assert "host node1, or ssh to it, is lost: it keeps the list of hosts, so the job is over" in job.output


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_on_any_host_when_the_command_is_ended(cluster: Hosts, tmp_path: Path, signum: int) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    with start(cluster, tmp_path, "--save_pid", "--elastic_training", "script.py", "wait") as job:
        until(lambda: all((tmp_path / f"{rank}of3").exists() for rank in range(3)), job, "three ranks run")
        assert [path.suffix for path in (tmp_path / "tmp").glob("*.ds")] == [".ds"]
        asked = time.monotonic()
        inner(job.process).send_signal(signum)
        assert job.wait(20) == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[signal.Signals(signum)]
        assert_gone(cluster, asked)
    assert not list((tmp_path / "tmp").iterdir())


def test_hosts_without_ssh_go_on_when_one_is_started_again_by_others(cluster: Hosts, tmp_path: Path) -> None:
    """As under Kubernetes, which starts a pod again: here the test does."""
    (tmp_path / "script.py").write_text(WAITING)

    def member(number: int) -> Job:
        place = ["--no_ssh", "--node_rank", str(number - 1), "--master_addr", cluster[1].address]
        return start(cluster, tmp_path, *place, "--elastic_training", "script.py", "wait", on=number)

    with member(1) as first, member(2), member(3) as third:
        until(lambda: all((tmp_path / f"{rank}of3").exists() for rank in range(3)), first, "three ranks run")
        cluster[3].kill()
        until(lambda: all((tmp_path / f"{rank}of2").exists() for rank in range(2)), first, "two ranks run")
        for rank in range(3):
            (tmp_path / f"{rank}of3").unlink()
        cluster[3].boot()
        third.wait()
        with member(3):
            until(lambda: all((tmp_path / f"{rank}of3").exists() for rank in range(3)), first, "three ranks run again")
            assert {(tmp_path / f"{rank}of3").read_text() for rank in range(3)} == {"2"}  # the same on all, late or not
