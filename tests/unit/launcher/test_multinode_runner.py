"""The classes of the field make the commands of our back ends."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from deepspeed.launcher import multinode_runner
from deepspeed.launcher.arguments import parse_runner_args
from deepspeed.launcher.backends import BACK_ENDS, BackEndError
from deepspeed.launcher.hostfile import encode_world_info
from deepspeed.launcher.multinode_runner import MultiNodeRunner, OpenMPIRunner, PDSHRunner

PAIR = {"a": [0, 1], "b": [0, 1]}
INFO = encode_world_info(PAIR)


def _fake(folder: Path, name: str, says: str = "") -> None:
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture(autouse=True)
def _own_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _fake(tmp_path, "pdsh")
    _fake(tmp_path, "mpirun", "mpirun (Open MPI) 5")


def test_there_is_a_class_for_each_back_end() -> None:
    classes = [getattr(multinode_runner, name) for name in multinode_runner.__all__]
    assert {each.name for each in classes if each is not MultiNodeRunner} == set(BACK_ENDS)


def test_a_command_carries_exports_resources_and_the_script() -> None:
    runner = PDSHRunner(parse_runner_args(["--master_port", "7", "train.py", "x y"]), INFO)
    runner.add_export(" KEY ", " v w ")
    environment: dict[str, str] = {}
    command = runner.get_cmd(environment, PAIR)
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    assert "export KEY='v w'; " in command[6]
    assert command[-2:] == ["train.py", "'x y'"]
    assert {"--master_addr=a", "--master_port=7"} <= set(command)
    assert environment == {"PDSH_RCMD_TYPE": "ssh"}


def test_files_that_the_command_reads_are_there(tmp_path: Path) -> None:
    runner = OpenMPIRunner(parse_runner_args(["train.py"]), INFO)
    assert runner.backend_exists()
    command = runner.get_cmd({}, None)
    assert Path(command[command.index("-hostfile") + 1]).read_text() == "a\na\nb\nb\n"


def test_a_back_end_that_is_absent_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    runner = PDSHRunner(parse_runner_args(["train.py"]), INFO)
    assert not runner.backend_exists()
    with pytest.raises(BackEndError, match="not installed"):
        runner.get_cmd({}, PAIR)
