"""A job on several hosts whose command or ranks are stopped for a while, or whose command cannot reach the launchers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.host_jobs import host_job, skip_unless_installed
from tests.support.hosts import Hosts, hosts, inner
from tests.support.launching import Job, wait_until

pytestmark = pytest.mark.alone  # limits of seconds

TICK = """
import os, sys, time
rank = int(os.environ["RANK"])
while not os.path.exists("go"):
    with open(f"ticks{rank}", "a") as file: file.write("x")
    time.sleep(0.02)
if rank == 1: sys.exit(7)
time.sleep(300)
"""

TRAIN = """
import os, torch, deepspeed
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
is_over = torch.zeros(1)
while not is_over:
    with open(f"ticks{rank}", "a") as file: file.write("x")
    is_over += os.path.exists("go")
    deepspeed.comm.all_reduce(is_over)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Hosts]:
    skip_unless_installed("pdsh")
    with hosts(3, slots=1) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _mended(cluster: Hosts) -> Iterator[None]:
    yield
    cluster.reset()


def _wait_until_ranks_live(folder: Path, ranks: int) -> None:
    def ticks() -> list[int]:
        paths = [folder / f"ticks{rank}" for rank in range(ranks)]
        return [path.stat().st_size if path.exists() else 0 for path in paths]

    before = ticks()
    wait_until(lambda: all(now > then + 3 for now, then in zip(ticks(), before, strict=True)), "all ranks live", 60)


def _rank_on(cluster: Hosts, number: int, script: str) -> psutil.Process:
    """The process of the rank on a host, as seen from outside."""
    (found,) = (
        p for p in cluster[number].jobs() if script in p.cmdline() and "deepspeed.launcher.launch" not in p.cmdline()
    )
    return found


def _assert_gone(cluster: Hosts, job: Job, since: float, seconds: float = 5.0) -> None:
    def is_gone() -> bool:
        left = [*job.processes(), *(each for host in cluster for each in host.jobs() if _name(each) != "sshd")]
        return not [process for process in left if _status(process) != psutil.STATUS_ZOMBIE]

    wait_until(is_gone, "nothing of the job is left", max(0.1, since + seconds - time.monotonic()))


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def test_a_rank_that_is_stopped_alone_on_its_host_is_settled_and_goes_on(cluster: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with host_job(cluster, tmp_path, ["train.py"]) as job:
        _wait_until_ranks_live(tmp_path, 3)
        rank = _rank_on(cluster, 2, "train.py")
        rank.suspend()
        wait_until(lambda: "was stopped by SIGSTOP, and the others wait for it" in job.output, "its launcher tells of it")
        assert "node2: " in job.output.partition("was stopped by SIGSTOP")[0].rpartition("\n")[2]
        time.sleep(6)  # longer than ranks of its own host would wait, and than a launcher may be silent
        assert job.process.poll() is None, job.output
        rank.resume()
        _wait_until_ranks_live(tmp_path, 3)
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.output


def test_a_command_that_is_stopped_for_longer_than_a_host_may_be_silent_goes_on(cluster: Hosts, tmp_path: Path) -> None:
    (tmp_path / "tick.py").write_text(TICK)
    with host_job(cluster, tmp_path, ["tick.py"]) as job:
        _wait_until_ranks_live(tmp_path, 3)
        command = inner(job.process)
        command.suspend()
        time.sleep(6)
        _wait_until_ranks_live(tmp_path, 3)
        command.resume()
        job.process.send_signal(signal.SIGCONT)  # what leads onto a host stops with what it leads to
        time.sleep(2)  # it would now see a silent hub
        _wait_until_ranks_live(tmp_path, 3)
        since = time.monotonic()
        command.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output
        _assert_gone(cluster, job, since)
        assert job.output.count("KeyboardInterrupt") == 3, "ranks get the signal that the command got"


@pytest.mark.parametrize("end", ["rank", "command"])
def test_a_job_whose_command_cannot_reach_the_launchers_runs_and_ends(cluster: Hosts, tmp_path: Path, end: str) -> None:
    """The ranks meet on a network that the command's host does not have."""
    for number in (1, 2):
        added = cluster[number].run("ip", "addr", "replace", f"10.78.0.{number}/24", "dev", "eth0")
        assert added.returncode == 0, added.stderr
    (tmp_path / "tick.py").write_text(TICK)
    words = ["--include", "node1@node2", "--master_addr", "10.78.0.1", "tick.py"]
    with host_job(cluster, tmp_path, words, front_end=3) as job:
        _wait_until_ranks_live(tmp_path, 2)
        since = time.monotonic()
        if end == "rank":
            (tmp_path / "go").touch()
            assert job.wait() == 7, job.output
            assert job.output.count("rank 1 on host node2 failed first, with exit status 7") == 1
        else:
            inner(job.process).send_signal(signal.SIGINT)
            assert job.wait() == 130, job.output
        _assert_gone(cluster, job, since)
