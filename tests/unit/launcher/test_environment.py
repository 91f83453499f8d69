from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import LaunchError
from deepspeed.launcher import environment
from deepspeed.launcher.environment import EnvironmentFileError, exported, parse_environment, read_environment_files

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=("Cs", "Cc")))


def test_lines_comments_blanks_and_quotes_are_read() -> None:
    text = "# who\n\nA=1\n  B = \nC=x=y z\nexport D='p q'\nE=\"it's $HOME\"\nF=\n".replace("  B = \n", "")
    assert parse_environment(text) == {"A": "1", "C": "x=y z", "D": "p q", "E": "it's $HOME", "F": ""}


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_what_a_shell_quotes_arrives_unchanged(values: dict[str, str]) -> None:
    text = "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
    assert parse_environment(text) == values


@given(NAMES, VALUES.map(str.strip).filter(lambda value: not value.startswith(("'", '"'))))
def test_a_bare_value_is_taken_as_it_stands(name: str, value: str) -> None:
    assert parse_environment(f"{name}={value}") == {name: value}


def test_every_bad_line_is_settled_by_number_and_never_by_content() -> None:
    with pytest.raises(EnvironmentFileError) as caught:
        parse_environment(
            "A=1\nhunter2\n1X=hunter2\nA B=hunter2\nQ='hunter2\nR='a' hunter2\n=hunter2", "/home/u/.deepspeed_env"
        )
    text = str(caught.value)
    assert "hunter2" not in text
    assert [n for n in range(1, 8) if f"line {n}" in text] == [2, 3, 4, 5, 6, 7]
    assert text.startswith("/home/u/.deepspeed_env: ")


def test_both_folders_are_read_and_the_later_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / ".e").write_text("A=secret1\nB=secret2\n")
    (here / ".e").write_text("B=secret3\n")
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        assert read_environment_files(".e", (home, here)) == {"A": "secret1", "B": "secret3"}
    assert "A, B" in caplog.text
    assert "secret" not in caplog.text


def test_an_absolute_name_is_one_file_and_a_missing_one_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "vars").write_text("A=1")
    assert read_environment_files(str(tmp_path / "vars"), (Path("/nowhere"), tmp_path)) == {"A": "1"}
    assert read_environment_files(".none", (tmp_path,)) == {}


def test_a_file_that_the_user_named_and_that_is_not_there_is_settled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_environment_files(".none", (tmp_path,), is_required=True) == {}
    assert "there is no file .none, which DS_ENV_FILE names" in caplog.text


def test_a_file_that_is_no_text_is_an_error_without_its_content(tmp_path: Path) -> None:
    (tmp_path / ".e").write_bytes(b"A=1\nB=secret\xff\n")
    with pytest.raises(LaunchError, match=r"\.e is no UTF-8 \(line 2\)") as caught:
        read_environment_files(".e", (tmp_path,))
    assert "secret" not in str(caught.value)
    (tmp_path / ".e").write_bytes(b"\xef\xbb\xbfA=1\r\n")  # as Windows writes it
    assert read_environment_files(".e", (tmp_path,)) == {"A": "1"}


def test_names_that_no_shell_can_set_stay_here() -> None:
    environ = {"DS_POD.NAME": "a", "PYTHON-X": "b", "DS_X": "c", "MLFLOW_()": "d"}
    assert exported(environ, {}, [], "/w") == {"DS_X": "c", "PYTHONPATH": "/w"}


def test_families_files_and_the_working_directory_travel_and_nothing_else() -> None:
    environ = {
        "MLFLOW_URI": "u",
        "PYTHONHASHSEED": "0",
        "MV2_X": "1",
        "UCX_NET": "n",
        "NCCL_DEBUG": "I",
        "HOME": "/h",
        "X": "y",
    }
    expected = {name: value for name, value in environ.items() if name not in ("HOME", "X")} | {"PYTHONPATH": "/w"}
    assert exported(environ, {}, ["NCCL"], "/w") == expected
    assert exported(environ, {"X": "file", "UCX_NET": "file"}, ["NCCL"], "/w") == expected | {"X": "file", "UCX_NET": "file"}
    assert exported({"PYTHONPATH": "/a:/b"}, {}, [], "/w") == {"PYTHONPATH": "/w:/a:/b"}


def test_our_own_variables_travel_but_for_the_one_that_names_a_file_here() -> None:
    environ = {"DS_WATCH": "1", "DEEPSPEED_TIMEOUT": "2", "DS_ENV_FILE": "/here"}
    assert exported(environ, {}, [], "/w") == {"DS_WATCH": "1", "DEEPSPEED_TIMEOUT": "2", "PYTHONPATH": "/w"}


def test_a_family_that_a_client_appends_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "EXPORT_ENVS", [*environment.EXPORT_ENVS, "WANDB"])
    assert exported({"WANDB_KEY": "k"}, {}, [], "/w") == {"WANDB_KEY": "k", "PYTHONPATH": "/w"}


def test_on_the_platform_that_sets_them_for_each_machine_two_variables_stay() -> None:
    network = {"NCCL_IB_HCA": "mlx", "UCX_NET_DEVICES": "mlx", "NCCL_DEBUG": "I"}
    assert exported(network, {}, ["NCCL"], "/w") == {**network, "PYTHONPATH": "/w"}
    assert exported({**network, "AISC_JOB_NAME": "j"}, {}, ["NCCL"], "/w") == {"NCCL_DEBUG": "I", "PYTHONPATH": "/w"}
