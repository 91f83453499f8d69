"""`launcher.far_hosts`: where a job meets, and what its back end is given."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import far_hosts
from deepspeed.launcher.arguments import launch_words, parse_runner_args
from deepspeed.launcher.backends import Command
from deepspeed.launcher.far_hosts import find_meeting, make_job, run
from deepspeed.launcher.probe import Probe

PAIR = {"worker-0.invalid": [0, 1], "worker-1.invalid": [0, 1]}


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The probes that were made: (host, by ssh). The host has two addresses, and port 29500 is in use."""
    made: list[tuple[str, bool]] = []

    def probe(host: str, _hostfile: str, *, by_ssh: bool, ssh_port: int | None = None) -> Probe:
        made.append((host, by_ssh))
        return Probe(("172.17.0.1", "10.0.0.5"), frozenset({29500}))

    monkeypatch.setattr(far_hosts, "probe", probe)
    monkeypatch.setattr(far_hosts, "addresses_of", lambda _: frozenset({"10.0.0.5"}))
    return made


def test_address_and_port_are_those_of_the_first_host(probed: list[tuple[str, bool]]) -> None:
    assert find_meeting(parse_runner_args(["t.py"]), PAIR) == ("10.0.0.5", 29501)
    assert probed == [("worker-0.invalid", True)]
    given = parse_runner_args(["--master_addr", "me", "--master_port", "7", "t.py"])
    assert find_meeting(given, PAIR) == ("me", 7)


def test_jobs_that_one_machine_starts_at_once_meet_at_different_ports(probed: list[tuple[str, bool]]) -> None:
    args = parse_runner_args(["t.py"])
    with contextlib.ExitStack() as of_first, contextlib.ExitStack() as of_second:
        first, second = (find_meeting(args, PAIR, leases).port for leases in (of_first, of_second))
        assert first > 29500
        assert second > first
    with contextlib.ExitStack() as leases:
        assert find_meeting(args, PAIR, leases).port == first


def test_the_probe_is_left_out_when_asked_and_with_slurm(probed: list[tuple[str, bool]]) -> None:
    for words in ("--no_ssh_check", "--launcher slurm"):
        assert find_meeting(parse_runner_args([*words.split(), "t.py"]), PAIR) == ("worker-0.invalid", 29500)
    assert not probed


def test_an_mpi_that_starts_on_this_machine_needs_no_ssh_to_it(probed: list[tuple[str, bool]]) -> None:
    find_meeting(parse_runner_args(["--launcher", "mpich", "t.py"]), {"localhost": [0], **PAIR})
    find_meeting(parse_runner_args(["t.py"]), {"localhost": [0], **PAIR})
    assert probed == [("localhost", False), ("localhost", True)]


def test_a_back_end_is_given_the_flags_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--launcher_args=\"-x 'a b'\" --ssh_port 7 --comment c --num_gpus 2 --venv_script v --bind_cores_to_rank -q"
    args = parse_runner_args([*shlex.split(flags), "t.py", "a b"])
    environ = {"PYTHONPATH": "/p", "NCCL_DEBUG": "INFO", "PATH": "/bin", "DS_JOB_TOKEN": "x", "DS_ENV_FILE": "f", "KEY": "v"}
    words = launch_words(args, "W", "10.0.0.1", 29500, front_end=True)
    job = make_job(args, PAIR, words, environ, {"KEY": "v"}, tmp_path)
    assert (job.launcher_args, job.ssh_port, job.comment, job.devices_per_host) == (("-x", "a b"), 7, "c", 2)
    assert (job.script, job.folder, job.venv_script) == (("t.py", "a b"), str(tmp_path), str(tmp_path / "v"))
    assert {"--front_end", "--bind_cores_to_rank", "--quiet", "--master_addr=10.0.0.1"} <= set(job.flags)
    assert job.exports == {"PYTHONPATH": f"{tmp_path}:/p", "NCCL_DEBUG": "INFO", "DS_JOB_TOKEN": "x", "KEY": "v"}
    assert make_job(args, PAIR, words, {"DS_ACCELERATOR": "cpu"}, {}, tmp_path).devices_per_host is None


def test_words_for_the_back_end_that_cannot_be_taken_apart_are_refused(tmp_path: Path) -> None:
    args = parse_runner_args(["--launcher_args", "-p 'gpu", "t.py"])
    words = launch_words(args, "W", "10.0.0.1", 29500)
    with pytest.raises(LaunchError, match=r"--launcher_args \"-p 'gpu\": No closing quotation\. Quote its words"):
        make_job(args, PAIR, words, {}, {}, tmp_path)


def test_a_command_that_the_system_refuses_says_how_long_it_is() -> None:
    with pytest.raises(
        LaunchError, match=r"true cannot be started: Argument list too long \(2 words, the longest of 200000 "
    ):
        far_hosts._start(Command(["true", "x" * 200_000]), {})


def test_a_back_end_that_is_not_installed_ends_the_command_before_anything_is_asked(
    probed: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="launcher 'mvapich' not installed"):
        run(parse_runner_args(["--launcher", "mvapich", "t.py"]), PAIR, {}, {})
    assert not probed
