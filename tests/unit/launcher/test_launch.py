from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import numa, ranks
from deepspeed.launcher.arguments import parse_launch_args
from deepspeed.launcher.hostfile import ResourceError, encode_world_info
from deepspeed.launcher.launch import rank_commands
from deepspeed.launcher.numa import CoreListError
from tests.support.launching import ROOT

INFO = encode_world_info({"a": [0, 2], "b": [1, 3]})
CPU = {"DS_ACCELERATOR": "cpu"}


def test_each_rank_gets_its_command_and_its_variables() -> None:
    words = [f"--world_info={INFO}", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29501", "t.py", "-x"]
    commands = rank_commands(parse_launch_args(words), {"KEEP": "me", **CPU})
    assert [command.argv for command in commands] == [
        [sys.executable, "-u", "t.py", f"--local_rank={local_rank}", "-x"] for local_rank in (0, 1)
    ]
    environment = commands[1].environment
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["CROSS_RANK"]) == ("3", "1", "1")
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["KEEP"]) == ("1,3", "me")
    assert "OMP_NUM_THREADS" not in environment


def test_the_visible_devices_variable_is_the_accelerators() -> None:
    args = parse_launch_args([f"--world_info={INFO}", "t.py"])
    assert rank_commands(args, {"DS_ACCELERATOR": "npu"})[0].environment["ASCEND_RT_VISIBLE_DEVICES"] == "0,2"


def test_devices_that_the_user_hid_stay_hidden() -> None:
    args = parse_launch_args([f"--world_info={INFO}", "t.py"])
    assert rank_commands(args, {"CUDA_VISIBLE_DEVICES": "", **CPU})[0].environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["t.py"], "--world_info was not given"),
        ([f"--world_info={INFO}", "--module", "--no_python", "t"], "give one of them"),
        ([f"--world_info={INFO}", "--node_rank=2", "t.py"], "give 0 to 1"),
    ],
)
def test_what_cannot_be_started_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ResourceError, match=text):
        rank_commands(parse_launch_args(words), CPU)


BOUND = [f"--world_info={INFO}", "--bind_cores_to_rank", "--bind_core_list=0-5", "t.py"]


def test_cores_are_bound_by_numactl_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.shutil, "which", lambda _name: "/usr/bin/numactl")
    monkeypatch.setattr(numa, "machine_nodes", lambda: {0: [0, 1, 2], 1: [3, 4, 5]})
    first, second = rank_commands(parse_launch_args(BOUND), CPU)
    assert first.argv[:6] == ["numactl", "-m", "0", "-C", "0-2", sys.executable]
    assert second.argv[:6] == ["numactl", "-m", "1", "-C", "3-5", sys.executable]
    assert first.environment["OMP_NUM_THREADS"] == second.environment["OMP_NUM_THREADS"] == "3"
    assert first.cores is None


def test_cores_are_bound_by_the_launcher_where_numactl_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.shutil, "which", lambda _name: None)
    commands = rank_commands(parse_launch_args(BOUND), CPU)
    assert [command.cores for command in commands] == [(0, 1, 2), (3, 4, 5)]
    assert commands[0].argv[0] == sys.executable
    assert commands[0].environment["OMP_NUM_THREADS"] == "3"


def test_cores_are_not_bound_under_another_binder() -> None:
    with pytest.raises(CoreListError, match="unset KMP_AFFINITY"):
        rank_commands(parse_launch_args(BOUND), {"KMP_AFFINITY": "compact", **CPU})


def test_without_the_flag_a_core_list_changes_nothing() -> None:
    commands = rank_commands(parse_launch_args([word for word in BOUND if word != "--bind_cores_to_rank"]), CPU)
    assert commands[0].cores is None
    assert commands[0].argv[0] == sys.executable


@pytest.mark.parametrize(
    ("scheduler", "variable", "size"),
    [
        ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("pmi", "PMI_RANK", "PMI_SIZE"),
        ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_a_member_that_a_scheduler_started_holds_the_one_rank_that_it_names(
    scheduler: str, variable: str, size: str
) -> None:
    args = parse_launch_args([f"--world_info={INFO}", f"--from_scheduler={scheduler}", "t.py"])
    (command,) = rank_commands(args, {variable: "2", size: "4", **CPU})
    environment = command.environment
    assert command.argv[-1] == "--local_rank=0"
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_SIZE"]) == ("2", "4", "2")
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_devices_that_slurm_handed_out_stay_as_they_are() -> None:
    args = parse_launch_args([f"--world_info={INFO}", "--from_scheduler=slurm", "t.py"])
    environ = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_GPUS": "4,6",
        "CUDA_VISIBLE_DEVICES": "4,6",
        **CPU,
    }
    (command,) = rank_commands(args, environ)
    assert (command.environment["CUDA_VISIBLE_DEVICES"], command.environment["LOCAL_RANK"]) == ("4,6", "1")


# A launcher in a process of its own, for it ends all its children. A settled link is as that of several launchers at the
# end of a job, of which the front end has heard.
LAUNCH = """
import sys
from deepspeed.launcher import launch
from deepspeed.launcher.link.cause import Alone
Alone.is_settled = sys.argv[1] == "settled"
launch._open_link = lambda args, seat, loop: Alone()
sys.exit(launch.run(launch.parse_launch_args(sys.argv[2:])))
"""


@pytest.mark.parametrize(
    ("scheduler", "link", "status"), [("openmpi", "settled", 0), ("openmpi", "alone", 7), ("pmi", "settled", 7)]
)
def test_under_open_mpi_the_status_of_a_rank_is_left_to_a_front_end_that_knows_it(
    scheduler: str, link: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("OMPI_COMM_WORLD", "PMI"):
        environ |= {f"{name}_RANK": "0", f"{name}_SIZE": "1"}
    info = f"--world_info={encode_world_info({'a': [0]})}"
    words = [link, info, f"--from_scheduler={scheduler}", str(tmp_path / "fails.py")]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *words], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
