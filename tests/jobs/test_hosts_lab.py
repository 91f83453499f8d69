"""The hosts that other tests run on are apart, can be broken and mended, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import LOCAL_FOLDER, SECOND_SSH_PORT, Hosts, hosts, inner
from tests.support.slurm import slurm


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with hosts(2, slots=1) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _mended(pair: Hosts) -> Iterator[None]:
    yield
    pair.reset()


def _reaches(pair: Hosts) -> bool:
    return pair[1].run("ssh", "-o", "ConnectTimeout=1", "node2", "true").returncode == 0


def test_hosts_differ_in_name_address_processes_and_node_local_folder(pair: Hosts) -> None:
    mark = f"{LOCAL_FOLDER}/mark"
    assert pair[2].run("touch", mark).returncode == 0
    told = pair[1].run(
        "sh", "-c", f"hostname; hostname -I; ssh node2 'hostname; hostname -I'; ls {mark}; ssh node2 ls {mark}"
    )
    assert told.stdout.split() == ["node1", "10.77.0.11", "node2", "10.77.0.12", mark]
    with subprocess.Popen(pair[1].command("sleep", "100")) as sleeper:
        process = inner(sleeper)
        assert process in pair[1].jobs()
        assert "sleep" not in pair[2].run("ps", "ax").stdout
        process.terminate()
    assert sleeper.returncode == -15


def test_ssh_answers_on_the_second_port_and_the_keys_are_not_those_of_the_user(pair: Hosts) -> None:
    told = pair[1].run("ssh", "-p", str(SECOND_SSH_PORT), "node2", "echo $SSH_CONNECTION; ls ~/.ssh 2> /dev/null")
    assert told.stdout.split()[2:] == ["10.77.0.12", str(SECOND_SSH_PORT)]


@pytest.mark.parametrize(("fault", "cure"), [("cut", "heal"), ("hole", "fill"), ("freeze", "thaw"), ("kill", "boot")])
def test_a_host_is_out_of_reach_until_it_is_mended(pair: Hosts, fault: str, cure: str) -> None:
    assert _reaches(pair)
    getattr(pair[2], fault)()
    assert not _reaches(pair)
    getattr(pair[2], cure)()
    assert _reaches(pair)


def test_a_host_has_the_memory_it_is_given(pair: Hosts) -> None:
    pair[2].limit_memory(100 << 20)
    assert pair[1].run("ssh", "node2", f"{sys.executable} -c 'bytearray(300 << 20)'; echo $?").stdout == "137\n"


def test_nothing_stays_of_hosts_and_their_daemons() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with hosts(2, slots=1) as cluster, slurm(cluster) as scheduler:
        environ = {**os.environ, **scheduler.environment}
        told = cluster[1].run("srun", "--immediate=10", "-N2", "hostname", env=environ)
        assert sorted(told.stdout.split()) == ["node1", "node2"], told.stderr
        assert cluster[2].run("sh", "-c", "setsid sleep 100 > /dev/null 2>&1 &").returncode == 0
        folder, processes = cluster.folder, [process for host in cluster for process in host.processes()]
    assert not Path(folder).exists()
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
