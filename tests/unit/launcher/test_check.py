"""What follows from hosts' answers; hosts that answer are in tests/jobs/test_hosts_tools.py."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import ssh_command, survey
from deepspeed.launcher.check import Expected, check, judge
from deepspeed.launcher.differences import difference_lines, told_variables
from deepspeed.launcher.runner import main
from deepspeed.launcher.survey import Answer

EXPECTED = Expected("3.11.7", {"torch": "2.13.0", "deepspeed": "1.0"}, "/job", ".token", 29500)


def _facts(**changes: Any) -> dict[str, Any]:
    good = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "1.0", "folder": True, "token": True, "port": ""}
    return {**good, **changes}


def _cures(answer: Answer, *, is_first: bool = True) -> list[str]:
    return [found.cure for found in judge(answer, EXPECTED, is_first=is_first).values() if found.cure]


def test_a_host_like_this_one_needs_nothing() -> None:
    assert _cures(Answer("node1", _facts(), skew_seconds=0.02, skew_error_seconds=0.01)) == []


@pytest.mark.parametrize(
    ("answer", "cure"),
    [
        (Answer("node1", status=255, trouble="Connection refused"), "make `ssh node1 true` work without a password"),
        (Answer("node1", status=127, trouble="not found"), "node1 has no "),
        (Answer("node1", _facts(python="3.10.1")), "node1 has Python 3.10.1, this machine 3.11.7"),
        (Answer("node1", _facts(torch="2.12.0")), "node1 has torch 2.12.0, this machine 2.13.0"),
        (Answer("node1", _facts(deepspeed="")), "node1 has no deepspeed: install deepspeed 1.0"),
        (Answer("node1", _facts(folder=False)), "node1 has no /job: start from a folder that all hosts share"),
        (Answer("node1", _facts(token=False)), "/job on node1 is not the one here"),
        (Answer("node1", _facts(port="Address already in use")), "port 29500 on node1: Address already in use"),
        (Answer("node1", _facts(), skew_seconds=-7.5, skew_error_seconds=0.1), "the clock of node1 differs by -7.5 s"),
    ],
)
def test_each_thing_that_is_wrong_comes_with_what_to_do(answer: Answer, cure: str) -> None:
    (found,) = _cures(answer)
    assert cure in found


def test_the_port_counts_only_where_ranks_meet() -> None:
    assert _cures(Answer("node2", _facts(port="Address already in use")), is_first=False) == []


def test_a_slow_answer_is_no_evidence_against_a_clock() -> None:
    assert _cures(Answer("node1", _facts(), skew_seconds=3.0, skew_error_seconds=2.5)) == []


def test_this_machine_alone_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    main(["--check", "--num_gpus", "2", "--master_port", str(port)])
    assert "All hosts are ready." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "the file that hosts look for is gone"


def test_a_port_in_use_makes_it_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        assert check(["localhost"], other.getsockname()[1]) == 1
    assert "Give another --master_port." in capsys.readouterr().out


def test_questions_reach_a_host_whatever_its_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $HOME; "here"'
    folder.mkdir()
    questions = "import json, os\nprint(json.dumps({'folder': os.getcwd()}))"
    (answer,) = survey.survey(["localhost"], questions, folder=str(folder))
    assert answer.facts == {"folder": str(folder)}
    assert abs(answer.skew_seconds) <= answer.skew_error_seconds + 0.05, "it is the same clock"


def test_an_answer_that_comes_together_with_the_clock_is_heard() -> None:
    hasty = f"import sys; print('{survey._MARK}1.0\\n' * 5 + '{{\"a\": 1}}', flush=True); sys.stdin.read()"
    assert survey._ask("node1", [sys.executable, "-c", hasty]).facts == {"a": 1}


def test_a_host_that_says_much_is_heard_to_the_end() -> None:
    much = "import sys; sys.stderr.write('warning ' * 100_000); "
    much += f"print('{survey._MARK}1.0\\n' * 5 + '{{\"a\": 1}}'); sys.stdin.read()"
    assert survey._ask("node1", [sys.executable, "-c", much]).facts == {"a": 1}


def test_a_host_whose_shell_greets_everybody_is_heard(tmp_path: Path) -> None:
    command = survey.remote_command("print('{\"a\": 1}')", str(tmp_path))
    answer = survey._ask("node1", ["sh", "-c", f"echo Welcome to node1; echo 2.0; {command}"])
    assert answer.facts == {"a": 1}
    assert abs(answer.skew_seconds) <= answer.skew_error_seconds + 0.05, "it is the same clock"


@pytest.mark.parametrize("talk", ["print('Welcome')", "import time; print(1.0); sys.stdin.readline()"])
def test_a_host_that_talks_of_other_things_is_not_waited_for(talk: str) -> None:
    answer = survey._ask("node1", [sys.executable, "-c", f"import sys; {talk}"])
    assert (answer.status, answer.trouble) == (1, "exit status 0")


def test_a_host_that_tells_no_facts_is_settled() -> None:
    wordy = f"import sys; print('{survey._MARK}1.0\\n' * 5 + 'Bye!'); sys.stdin.read()"
    assert survey._ask("node1", [sys.executable, "-c", wordy]).trouble == "no facts came, but 'Bye!'"


def test_a_host_whose_answer_fails_is_settled_in_its_own_words(tmp_path: Path) -> None:
    (answer,) = survey.survey(["localhost"], "raise SystemExit('no such thing')", folder=str(tmp_path))
    assert (answer.status, answer.trouble) == (1, "no such thing")


def test_only_what_differs_between_hosts_is_listed() -> None:
    here = {"torch": "2.13.0", "ops": {"adam": {"state": "native"}}, "variable": {"NCCL_DEBUG": "INFO"}}
    there = json.loads(json.dumps(here))
    there["torch"], there["ops"]["adam"]["state"] = "2.12.0", "twin"
    del there["variable"]["NCCL_DEBUG"]
    answers = [Answer("a", here), Answer("b", here, 0.01, 0.01), Answer("c", there, 9.0, 0.01), Answer("d", trouble="gone")]
    assert difference_lines(answers) == [
        "3 of 4 host(s) answered: a, b, c",
        "- d did not answer: gone",
        "- torch: a, b: 2.13.0 | c: 2.12.0",
        "- ops adam state: a, b: native | c: twin",
        "- variable NCCL_DEBUG: a, b: INFO | c: (not there)",
        "- clock: that of c is 9.000 s ahead of that of a",
    ]
    assert difference_lines(answers[:2])[1:] == ["nothing differs"]


def test_variables_whose_names_tell_of_a_secret_are_not_told() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "DS_JOB_TOKEN": "x",
        "DS_DB_PASSWD": "x",
        "NCCL_AUTH": "x",
        "WANDB_API_KEY": "x",
        "HOME": "/",
        "PATH": "/bin",
    }
    assert told_variables(environ) == {"NCCL_DEBUG": "INFO", "PATH": "/bin"}


def test_ds_ssh_without_pdsh_or_hostfile_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(LaunchError, match="apt-get install pdsh"):
        ssh_command.run(["hostname"])
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/pdsh")
    with pytest.raises(LaunchError, match="no hostfile"):
        ssh_command.run(["-f", str(tmp_path / "absent"), "hostname"])
