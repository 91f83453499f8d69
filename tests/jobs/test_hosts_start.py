"""Jobs on several hosts over each back end that is installed: what ranks are given, and where they are."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_jobs import BY_RANK, run_on_hosts, skip_unless_installed
from tests.support.hosts import SECOND_SSH_PORT, Hosts, hosts
from tests.support.slurm import Slurm, slurm

BACK_ENDS = ("pdsh", *BY_RANK)

# Each rank leaves its arguments and environment in a file.
TELL = """
import json, os, socket, sys
here = {"args": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd(), "host": socket.gethostname()}
here["cores"] = sorted(os.sched_getaffinity(0))
open(os.environ["T_TOLD"] + "/rank" + os.environ["RANK"], "w").write(json.dumps(here))
"""

NASTY = [
    "a b",
    'say "hi"',
    "it's",
    "$HOME `id` $(id)",
    "two\nlines",
    "caf\u00e9 \u2713",
    "",
    "--num_gpus",
    "--",
    "-q",
    "\\",
    "*",
    "%n",
]
SECRET = "hunter2-\u2713 'x' $y"


@pytest.fixture(scope="module")
def trio() -> Iterator[Hosts]:
    with hosts(3, slots=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scheduler(trio: Hosts) -> Iterator[Slurm]:
    with slurm(trio) as made:
        yield made


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """What the back end of the test needs, and the folder where ranks tell."""
    back_end = request.getfixturevalue("back_end") if "back_end" in request.fixturenames else "pdsh"
    skip_unless_installed(back_end)
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / ".deepspeed_env").write_text(f"T_TOLD={tmp_path}\n")
    return dict(request.getfixturevalue("scheduler").environment) if back_end == "slurm" else {}


def _read(folder: Path, count: int) -> list[dict[str, Any]]:
    assert sorted(path.name for path in folder.glob("rank*")) == [f"rank{rank}" for rank in range(count)]
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(count)]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_places_words_and_variables_arrive_unchanged(
    trio: Hosts, tmp_path: Path, back_end: str, environment: dict[str, str]
) -> None:
    nasty = {f"DS_T{i}": value for i, value in enumerate(NASTY)}
    with (tmp_path / ".deepspeed_env").open("a") as file:
        file.write(f"T_SECRET={SECRET}\n")
    words = ["--launcher", back_end, "--master_port", "29777", "tell.py", *NASTY, ":"]
    status, output = run_on_hosts(trio, tmp_path, words, {**environment, **nasty, "STAYS_WITH_PDSH": "x"})
    assert status == 0, output
    told = _read(tmp_path, 6)
    for rank, each in enumerate(told):
        environ = each["environ"]
        expected = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 6, "LOCAL_SIZE": 2, "CROSS_RANK": rank // 2}
        expected |= {"CROSS_SIZE": 3, "MASTER_ADDR": trio[1].address, "MASTER_PORT": 29777, "CUDA_VISIBLE_DEVICES": "0,1"}
        assert {name: environ[name] for name in expected} == {name: str(value) for name, value in expected.items()}
        assert each["host"] == f"node{1 + rank // 2}"
        assert each["args"] == [f"--local_rank={rank % 2}", *NASTY, ":"]
        assert each["cwd"] == str(tmp_path)
        assert {name: environ[name] for name in nasty} == nasty
        assert environ["T_SECRET"] == SECRET
        assert environ["PYTHONPATH"].split(":")[0] == str(tmp_path)
    if back_end in ("pdsh", "openmpi"):  # the others take the whole environment along
        assert "STAYS_WITH_PDSH" not in told[5]["environ"]
    assert "hunter2" not in output


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_the_hosts_of_a_filter_run_in_the_order_of_the_hostfile_with_unequal_slots(
    trio: Hosts, tmp_path: Path, back_end: str, environment: dict[str, str]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node3 slots=2\nnode1 slots=2\nnode2 slots=2\n")
    chosen = "node3:0@node1" if back_end == "slurm" else "node3:1@node1"
    words = ["-H", str(hostfile), "--include", chosen, "--launcher", back_end, "--no_local_rank", "tell.py"]
    status, output = run_on_hosts(trio, tmp_path, words, environment, front_end=2)
    assert status == 0, output
    told = _read(tmp_path, 3)
    assert [(each["host"], each["environ"]["LOCAL_RANK"]) for each in told] == [
        ("node3", "0"),
        ("node1", "0"),
        ("node1", "1"),
    ]
    # Slurm's clusters often let nobody in by ssh, so that no host is asked for its address.
    assert {each["environ"]["MASTER_ADDR"] for each in told} == {"node3" if back_end == "slurm" else trio[3].address}
    if back_end != "slurm":
        assert [each["environ"]["CUDA_VISIBLE_DEVICES"] for each in told] == ["1", "0,1", "0,1"]


@pytest.mark.parametrize("back_end", ["pdsh", "openmpi", "mpich", "impi"])
def test_hosts_may_be_known_by_other_names_than_they_give_themselves(
    trio: Hosts, tmp_path: Path, back_end: str, environment: dict[str, str]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{trio[number].address} slots=1\n" for number in (2, 1)))
    status, output = run_on_hosts(trio, tmp_path, ["-H", str(hostfile), "--launcher", back_end, "tell.py"], environment)
    assert status == 0, output
    assert [each["host"] for each in _read(tmp_path, 2)] == ["node2", "node1"]


@pytest.mark.parametrize("back_end", ["pdsh", "openmpi", "mpich", "impi"])
def test_one_host_can_be_reached_through_a_back_end_and_another_port(
    trio: Hosts, tmp_path: Path, back_end: str, environment: dict[str, str]
) -> None:
    (tmp_path / "activate").write_text("export T_ACTIVATED=yes\n")
    words = ["-i", "node2", "--force_multi", "--launcher", back_end, "--ssh_port", str(SECOND_SSH_PORT)]
    status, output = run_on_hosts(
        trio, tmp_path, [*words, "--venv_script", "activate", "--module", "tell", "x"], environment
    )
    assert status == 0, output
    for each in _read(tmp_path, 2):
        assert each["host"] == "node2"
        assert each["environ"]["SSH_CONNECTION"].split()[3] == str(SECOND_SSH_PORT)
        assert each["environ"]["T_ACTIVATED"] == "yes"


def test_flags_of_ranks_reach_every_host(trio: Hosts, tmp_path: Path, environment: dict[str, str]) -> None:
    words = [
        "--num_nodes",
        "2",
        "--bind_cores_to_rank",
        "--bind_core_list",
        "0-1",
        "--enable_each_rank_log",
        "logs",
        "--no_python",
    ]
    (tmp_path / "tell.sh").write_text(f"#!/bin/sh\necho here\nexec {sys.executable} {tmp_path}/tell.py\n")
    (tmp_path / "tell.sh").chmod(0o755)
    status, output = run_on_hosts(trio, tmp_path, [*words, "./tell.sh"], environment)
    assert status == 0, output
    assert [each["cores"] for each in _read(tmp_path, 4)] == [[0], [1], [0], [1]]
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert [name[-len("_rank0.log") :] for name in logs] == [f"_rank{rank}.log" for rank in range(4)]
    assert all((tmp_path / "logs" / name).read_text() == "here\n" for name in logs)


def test_a_free_port_is_found_on_the_first_host_and_a_fixed_one_that_is_in_use_refused(
    trio: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node2 slots=1\nnode3 slots=1\n")
    server = "import socket, sys; s = socket.create_server(('', 29500)); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        trio[2].command(sys.executable, "-c", server), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == b"up\n"
        status, output = run_on_hosts(trio, tmp_path, ["-H", str(hostfile), "tell.py"], environment)
        assert status == 0, output
        assert {each["environ"]["MASTER_PORT"] for each in _read(tmp_path, 2)} == {"29501"}
        words = ["-H", str(hostfile), "--master_port", "29500", "tell.py"]
        status, output = run_on_hosts(trio, tmp_path, words, environment)
        assert (status, "--master_port 29500 is in use on node2" in output) == (1, True), output
        assert held.stdin is not None
        held.stdin.close()


def test_a_host_that_ssh_does_not_reach_ends_the_command_with_what_to_do(
    trio: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("nowhere slots=1\nnode3 slots=1\n")
    status, output = run_on_hosts(trio, tmp_path, ["-H", str(hostfile), "tell.py"], environment)
    assert status == 1
    assert "host=nowhere was not reachable via ssh" in output
    assert "--no_ssh_check" in output
    assert "Traceback" not in output


def test_a_later_host_that_ssh_does_not_reach_ends_the_job_within_seconds(
    trio: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1 slots=1\nnode3 slots=1\nnowhere slots=1\n")  # ssh does not even find its address
    began = time.monotonic()
    status, output = run_on_hosts(trio, tmp_path, ["-H", str(hostfile), "tell.py"], environment)
    assert status == 255, output
    assert time.monotonic() - began < 15
    assert "a host's launcher ended before the job had started: see above" in output
    assert "nowhere" in output.partition("a host's launcher ended")[0]
    assert not list(tmp_path.glob("rank*"))


def test_a_port_that_was_taken_meanwhile_ends_the_job_on_all_hosts(
    trio: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    server = "import socket, sys; s = socket.create_server(('', 29500)); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        trio[1].command(sys.executable, "-c", server), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == b"up\n"
        began = time.monotonic()
        status, output = run_on_hosts(trio, tmp_path, ["--no_ssh_check", "tell.py"], environment)
        assert time.monotonic() - began < 15
        assert held.stdin is not None
        held.stdin.close()
    assert status != 0
    assert "host node1: the launcher of rank 0 cannot listen on node1:29500, where the ranks are to meet" in output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("rank*"))


def test_a_shell_that_greets_everybody_is_no_hindrance(trio: Hosts, tmp_path: Path, environment: dict[str, str]) -> None:
    greeting = trio.folder / "ssh" / "sshrc"  # what sshd runs before each command, like an echo in ~/.bashrc
    greeting.write_text("echo Welcome to $(hostname).\necho Note: see docs: a b c\n")
    try:
        status, output = run_on_hosts(trio, tmp_path, ["tell.py"], environment)
        assert status == 0, output
        assert {each["environ"]["MASTER_ADDR"] for each in _read(tmp_path, 6)} == {trio[1].address}
        told = trio[1].run(sys.executable, "-m", "deepspeed.launcher.runner", "--check", "-H", str(trio.hostfile))
        assert (told.returncode, "All hosts are ready." in told.stdout) == (0, True), told.stdout
    finally:
        greeting.unlink()


@pytest.mark.parametrize("back_end", ["slurm"])
def test_slurm_fails_at_once_what_it_cannot_place(
    trio: Hosts, tmp_path: Path, back_end: str, environment: dict[str, str]
) -> None:
    words = ["--launcher", back_end, "--launcher_args=--cpus-per-task=64 --immediate=1", "tell.py"]
    status, output = run_on_hosts(trio, tmp_path, words, environment, seconds=30)
    assert status != 0
    assert "srun: error" in output
