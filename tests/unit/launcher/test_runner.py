from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import runner
from deepspeed.launcher.hostfile import ResourceError
from deepspeed.launcher.runner import main, parse_args, run, select_resources

CPU = {"DS_ACCELERATOR": "cpu"}
POOL = {"a": 4, "b": 2}


def _args(words: str) -> argparse.Namespace:
    return parse_args([*words.split(), "t.py"])


@pytest.mark.parametrize(
    ("words", "environ", "slots"),
    [
        ("", {}, [0]),
        ("--num_gpus 3", {}, [0, 1, 2]),
        ("--num_accelerators 2 --num_nodes 1", {}, [0, 1]),
        ("--include localhost", {}, [0]),
        ("--include localhost:1,3", {}, [1, 3]),
        ("", {"CUDA_VISIBLE_DEVICES": "0,2"}, [0, 2]),
        ("--num_nodes 1", {"CUDA_VISIBLE_DEVICES": "0,2"}, [0, 2]),
        ("", {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ["GPU-1", "GPU-2"]),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, [0]),
        ("--num_gpus 2", {"CUDA_VISIBLE_DEVICES": "5"}, [0, 1]),
        ("--include localhost:1", {"CUDA_VISIBLE_DEVICES": "5,6"}, [1]),
    ],
)
def test_a_cpu_machine_runs_as_many_ranks_as_are_named(words: str, environ: Mapping[str, str], slots: list[int]) -> None:
    assert select_resources(_args(words), None, {**CPU, **environ}) == {"localhost": slots}


@pytest.mark.parametrize(("visible", "is_settled"), [("2,3", True), ("", False), (None, False)])
def test_with_a_hostfile_its_slots_count_and_the_variable_does_not(
    visible: str | None, is_settled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {**CPU, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        assert select_resources(_args(""), {"localhost": 2}, environ) == {"localhost": [0, 1]}
    told = "Detected VISIBLE_DEVICES=2,3: ignored, as the hostfile says which slots there are"
    assert (told in caplog.text) is is_settled


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        ("", [0, 1, 2, 3]),
        ("--exclude localhost:0,2", [1, 3]),
        ("--include localhost:3", [3]),
        ("--num_gpus 6", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_machine_with_devices_runs_a_rank_on_each(words: str, slots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "count_devices", lambda _environ: 4)
    assert select_resources(_args(words), None, {}) == {"localhost": slots}


@pytest.mark.parametrize(
    ("words", "count", "text"),
    [
        ("--include localhost:4", 4, "No slot '4'"),
        ("", 0, "no device"),
        ("--exclude localhost", 2, "no slot is left"),
        ("--num_nodes 2", 2, "there are only 1 hosts"),
        ("--num_gpus 0", 2, "at least 1"),
        ("--include worker-0", 2, "Hostname 'worker-0' not found"),
        ("--include localhost --num_gpus 1", 2, "Cannot specify num_nodes/gpus with include/exclude"),
        ("--exclude localhost:0 --num_nodes 1", 2, "Cannot specify num_nodes/gpus with include/exclude"),
    ],
)
def test_slots_that_this_machine_cannot_give_are_refused(
    words: str, count: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "count_devices", lambda _environ: count)
    with pytest.raises(ResourceError, match=text):
        select_resources(_args(words), None, {})


def test_a_hostfile_is_filtered_and_counted_and_the_variable_is_left_out_of_it() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "7"}
    assert select_resources(_args(""), POOL, visible) == {"a": [0, 1, 2, 3], "b": [0, 1]}
    assert select_resources(_args("-i a:1@b"), POOL, visible) == {"a": [1], "b": [0, 1]}
    assert select_resources(_args("--num_nodes 1 --num_gpus 2"), POOL, visible) == {"a": [0, 1]}


def test_a_variable_that_is_used_or_ignored_is_settled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        select_resources(_args(""), None, {**CPU, "CUDA_VISIBLE_DEVICES": "0,2"})
        assert "Detected VISIBLE_DEVICES=0,2: setting --include=localhost:0,2" in caplog.text
        select_resources(_args("--num_gpus 1"), None, {**CPU, "CUDA_VISIBLE_DEVICES": "0,2"})
    assert "Detected VISIBLE_DEVICES=0,2: ignored" in caplog.text


@pytest.fixture
def hostfile(tmp_path: object) -> str:
    path = f"{tmp_path}/hosts"
    with open(path, "w") as file:
        file.write("worker-0.invalid slots=2\nworker-1.invalid slots=2\n")
    return path


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--autotuning run", "--autotuning is not built yet"),
    ],
)
def test_what_is_not_built_yet_is_refused_with_what_to_do(words: str, text: str, hostfile: str) -> None:
    with pytest.raises(LaunchError, match=text):
        run(_args(words.format(hosts=hostfile)))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-H {hosts} --no_ssh", "give 0 to 1"),
        ("-H {hosts} --no_ssh --node_rank 2 --master_addr x", "give 0 to 1"),
        ("-H {hosts} --no_ssh --node_rank 0", "needs --master_addr: the address of worker-0.invalid"),
    ],
)
def test_a_start_without_ssh_needs_to_know_its_place(words: str, text: str, hostfile: str) -> None:
    with pytest.raises(ResourceError, match=text):
        run(_args(words.format(hosts=hostfile)))


def test_called_by_a_program_main_raises_and_as_a_command_it_prints(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--num_nodes", "1", "-i", "localhost", "t.py"]
    with pytest.raises(ValueError, match="Cannot specify num_nodes/gpus"):
        main(words)
    monkeypatch.setattr("sys.argv", ["deepspeed", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert "Cannot specify num_nodes/gpus" in caplog.text


@pytest.mark.parametrize(
    ("words", "selection", "needed"),
    [
        ("", {"localhost": [0]}, False),
        ("--force_multi", {"localhost": [0]}, True),
        ("", {"a.invalid": [0], "b.invalid": [0]}, True),
        ("", {"worker-0.invalid": [0]}, True),
        ("--no_ssh --node_rank 0", {"a.invalid": [0], "b.invalid": [0]}, False),
    ],
)
def test_a_back_end_is_needed_for_other_hosts_or_when_asked_for(
    words: str, selection: dict[str, list[int]], needed: bool
) -> None:
    assert runner._needs_back_end(_args(words), selection) is needed
