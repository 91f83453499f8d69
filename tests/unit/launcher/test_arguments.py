from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.arguments import launch_words, packed, parse_launch_args, parse_runner_args, rank_argv

WORDS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
    | st.sampled_from(["--", "-", "--num_gpus", "--num_gpus=3", "--local_rank=9", "-q", "", "a b", "$HOME", "\n", "--help"]),
    max_size=6,
)


def _through_both(words: list[str]) -> list[str]:
    """The command of local rank 1, by way of the runner's and the launcher's command lines."""
    argv = launch_words(parse_runner_args(words), "e30=", "127.0.0.1", 29500).argv()
    start = argv.index("deepspeed.launcher.launch") + 1
    return rank_argv(parse_launch_args(argv[start:]), 1)


@given(WORDS)
def test_the_arguments_of_the_script_arrive_unchanged(words: list[str]) -> None:
    assert _through_both(["--num_gpus", "2", "train.py", *words]) == [
        sys.executable,
        "-u",
        "train.py",
        "--local_rank=1",
        *words,
    ]


@given(WORDS)
def test_a_separator_before_the_script_is_dropped_and_no_other(words: list[str]) -> None:
    assert _through_both(["--no_python", "--no_local_rank", "--", "cmd", *words]) == ["cmd", *words]


def test_a_command_that_looks_like_a_flag_can_follow_the_separator() -> None:
    assert _through_both(["--no_python", "--no_local_rank", "--", "--odd", "x"]) == ["--odd", "x"]


def test_module_and_local_rank_flags_shape_the_command() -> None:
    assert _through_both(["--module", "pkg.train", "-x"]) == [
        sys.executable,
        "-u",
        "-m",
        "pkg.train",
        "--local_rank=1",
        "-x",
    ]
    assert _through_both(["--module", "--no_local_rank", "pkg.train"]) == [sys.executable, "-u", "-m", "pkg.train"]
    assert _through_both(["--no_python", "./run.sh"]) == ["./run.sh", "--local_rank=1"]


def test_every_flag_of_the_launcher_is_passed_on() -> None:
    words = (
        "--module --no_local_rank --enable_each_rank_log logs --bind_cores_to_rank --bind_core_list 0-3 -q --log_level debug"
    )
    made = launch_words(parse_runner_args([*words.split(), "m"]), "e30=", "10.0.0.1", 2950, 7, front_end=True)
    argv = made.argv("--node_rank=1")
    args = parse_launch_args(argv[argv.index("deepspeed.launcher.launch") + 1 :])
    assert (args.module, args.no_local_rank, args.bind_cores_to_rank, args.quiet) == (True, True, True, True)
    assert (args.no_python, args.enable_each_rank_log, args.bind_core_list) == (False, "logs", "0-3")
    assert (args.world_info, args.master_addr, args.master_port, args.node_rank) == ("e30=", "10.0.0.1", 2950, 1)
    assert (args.save_pid, args.log_level, args.training_script, args.front_end) == (7, "debug", "m", True)


@given(WORDS)
def test_a_packed_script_is_the_script(words: list[str]) -> None:
    args = parse_launch_args(["--node_rank=1", packed(["train.py", *words])])
    assert (args.node_rank, args.training_script, args.training_script_args) == (1, "train.py", words)


def test_what_follows_a_separator_is_never_taken_for_a_packed_script() -> None:
    word = packed(["other.py"])
    assert parse_launch_args(["--", "train.py", word]).training_script_args == [word]


def test_the_defaults_are_the_documented_ones() -> None:
    args = parse_runner_args(["train.py"])
    assert args.hostfile == os.environ.get("DLTS_HOSTFILE", "/job/hostfile")
    assert (args.include, args.exclude, args.master_addr, args.launcher_args, args.autotuning) == ("", "", "", "", "")
    assert (args.num_nodes, args.num_gpus, args.node_rank, args.min_elastic_nodes, args.max_elastic_nodes) == (-1,) * 5
    assert (args.launcher, args.log_level, args.enable_each_rank_log) == ("pdsh", "info", "None")
    assert (args.bind_core_list, args.ssh_port, args.venv_script) == (None, None, None)
    launch = parse_launch_args(["train.py"])
    assert (launch.node_rank, launch.master_addr, launch.master_port) == (0, "127.0.0.1", 29500)
    assert (launch.world_info, launch.save_pid, launch.from_scheduler, launch.front_end) == ("None", 0, None, False)


def test_short_and_other_spellings_are_known() -> None:
    args = parse_runner_args(["-H", "f", "-i", "a", "--num_accelerators", "3", "--launcher", "SLURM", "-q", "t.py"])
    assert (args.hostfile, args.include, args.num_gpus, args.launcher, args.quiet) == ("f", "a", 3, "slurm", True)
    assert parse_runner_args(["-e", "b", "t.py"]).exclude == "b"


@pytest.mark.parametrize(
    "words", [[], ["--num_gpus", "2"], ["--"], ["--launcher", "rsh", "t.py"], ["--num_nodes", "1:2", "t.py"]]
)
def test_a_command_line_without_a_script_or_with_a_bad_value_exits_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_runner_args(words)
    assert caught.value.code == 2
    assert "usage: deepspeed" in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P came with 3.11")
def test_the_launcher_is_kept_from_importing_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = launch_words(parse_runner_args(["t.py"]), "e30=", "127.0.0.1", 29500).argv()
    assert argv[: argv.index("deepspeed.launcher.launch")] == [sys.executable, "-u", "-P", "-m"]


def test_the_launcher_imports_the_working_directory_when_the_package_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[3])
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if path not in ("", root))])
    assert "-P" not in launch_words(parse_runner_args(["t.py"]), "e30=", "127.0.0.1", 29500).argv()


def test_the_reference_page_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "launcher.md").read_text()
    for parse in (parse_runner_args, parse_launch_args):
        with pytest.raises(SystemExit):
            parse(["--help"])
        flags = set(re.findall(r"--[a-z]\w*", capsys.readouterr().out))
        assert {flag for flag in flags if f"`{flag}" not in page} == set()
