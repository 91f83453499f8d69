"""`accelerate launch` with us on two hosts, by its launchers: the losses are those of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.accelerate_jobs import ACCELERATE, SCRIPT, accelerate, launched, losses_of_one_process, told_by
from tests.support.clients import assert_same_curve
from tests.support.host_jobs import skip_unless_installed
from tests.support.hosts import Hosts, hosts
from tests.support.launching import Job

PORT = "29611"


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with hosts(2, slots=1) as cluster:
        yield cluster


def _options(cluster: Hosts, launcher: str, machine: int = 0) -> list[str]:
    ours = ["--use_deepspeed", "--zero_stage", "2", "--gradient_clipping", "0.5", "--deepspeed_multinode_launcher", launcher]
    places = ["--deepspeed_hostfile", str(cluster.hostfile), "--main_process_ip", cluster[1].address]
    count = ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(machine), "--same_network"]
    return [*ours, *places, *count, "--main_process_port", PORT]


def assert_trained(folder: Path) -> None:
    told = told_by(folder, 2)
    assert [each["host"] for each in told] == ["node1", "node2"]
    assert {(each["kind"], each["ranks"], each["stage"]) for each in told} == {("DEEPSPEED", 2, 2)}
    expected = losses_of_one_process()
    for each in told:
        assert_same_curve(each["losses"], expected)


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_one_command_starts_all_hosts(pair: Hosts, tmp_path: Path, launcher: str) -> None:
    skip_unless_installed(launcher)
    command = pair[1].command(*ACCELERATE, folder=tmp_path)
    status, output = launched(tmp_path, _options(pair, launcher), command=command)
    assert status == 0, output
    assert_trained(tmp_path)


@pytest.mark.parametrize("launcher", ["nossh", "standard"])
def test_a_command_on_each_host_starts_its_ranks(pair: Hosts, tmp_path: Path, launcher: str) -> None:
    (tmp_path / "out").mkdir()
    with contextlib.ExitStack() as stack:
        jobs = []
        for host in pair:
            own = tmp_path / host.name
            own.mkdir()
            words = [*_options(pair, launcher, host.number - 1), SCRIPT, str(tmp_path / "out")]
            # torch's elastic run looks its own name up, and gloo the way to it
            environment = {**accelerate(own), "GLOO_SOCKET_IFNAME": "eth0"}
            command = host.command(*ACCELERATE, folder=own)
            jobs.append(stack.enter_context(Job(own, words, environment, command=command)))
        assert [job.wait(120) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    assert_trained(tmp_path)


def test_the_exit_status_of_a_rank_on_another_host_comes_through(pair: Hosts, tmp_path: Path) -> None:
    skip_unless_installed("pdsh")
    command = pair[1].command(*ACCELERATE, folder=tmp_path)
    status, output = launched(tmp_path, _options(pair, "pdsh"), ["--fail-on", "1"], command=command)
    assert status != 0
    assert "returned non-zero exit status 7" in output
