"""The command that runs the clients' own tests: a list of passes may only grow, and a listed test that fails is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

_SUITES = Path(__file__).parent / "suites"
_NAMES = ("passes", "clients", "run")


@pytest.fixture
def run() -> Iterator[ModuleType]:
    """The command's module, imported as the command does: siblings by their short names, forgotten afterwards."""
    before = list(sys.path)
    sys.path.insert(0, str(_SUITES))
    try:
        import run as module  # type: ignore[import-not-found]

        yield module
    finally:
        sys.path[:] = before
        for name in _NAMES:
            sys.modules.pop(name, None)


_TESTS = """
import unittest
import pytest

def test_good(): assert True
def test_bad(): assert False, "as it is meant to"

@pytest.mark.skipif(True, reason="test requires GPU")
def test_marked(): assert True

@pytest.mark.skipif(True, reason="test requires GPU")
def test_left_alone(): assert True

class TestSubs(unittest.TestCase):
    def test_subs(self):
        for number in range(2):
            with self.subTest(number):
                assert number == 0
"""


def test_only_tests_that_pass_are_listed_and_a_listed_one_that_does_not_is_told(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A made-up client whose source lies there already: nothing is fetched, and pytest runs it in a process of its own."""
    monkeypatch.setattr(run, "version", lambda name: "1.0")
    lists = tmp_path / "lists"
    lists.mkdir()
    client = run.Client(
        "made-up", tests=("tests/test_it.py",), without_gpu=("test_marked",), laid={"tests/test_it.py": _TESTS}
    )
    (tmp_path / "folder" / "made-up-1.0").mkdir(parents=True)
    arguments = ["--folder", str(tmp_path / "folder")]

    listed = lists / "made-up-1.0.txt"
    listed.write_text("tests/test_it.py::test_bad\ntests/test_it.py::test_left_alone\n")
    before = listed.read_text()
    assert run.main(arguments, [client], lists) == 1  # failed, and skipped: both are lost
    assert listed.read_text() == before  # only --update writes
    told = capsys.readouterr().out
    assert "LOST: tests/test_it.py::test_bad" in told
    assert "LOST: tests/test_it.py::test_left_alone" in told
    assert "new: tests/test_it.py::test_good" in told
    assert "fails, unlisted: tests/test_it.py::TestSubs::test_subs" in told

    assert run.main([*arguments, "--update"], [client], lists) == 1
    names = ("test_bad", "test_good", "test_left_alone", "test_marked")  # neither of the lost ones is taken off
    assert listed.read_text() == "".join(f"tests/test_it.py::{name}\n" for name in names)


def test_a_client_none_of_whose_tests_ran_is_an_error(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "version", lambda name: "1.0")
    client = run.Client("made-up", tests=("tests/test_it.py",), laid={"tests/test_it.py": "import no_such_module"})
    (tmp_path / "made-up-1.0").mkdir()
    with pytest.raises(RuntimeError, match="ran none of made-up's tests and ended with status 2"):
        run.main(["--folder", str(tmp_path)], [client], tmp_path)


def _made_up(run: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, **settings: Any) -> Any:
    monkeypatch.setattr(run, "version", lambda name: "1.0")
    (folder / "made-up-1.0").mkdir()
    return run.Client("made-up", tests=("tests/test_it.py",), laid={"tests/test_it.py": text}, **settings)


def test_what_passed_before_a_test_that_ends_pytest_is_listed(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\ndef test_good(): pass\ndef test_last(): os._exit(3)\ndef test_never(): pass\n"
    client = _made_up(run, tmp_path, monkeypatch, text)
    assert run.main(["--folder", str(tmp_path), "--update"], [client], tmp_path) == 0
    assert (tmp_path / "made-up-1.0.txt").read_text() == "tests/test_it.py::test_good\n"


def test_a_client_whose_tests_do_not_end_is_given_up(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = _made_up(run, tmp_path, monkeypatch, "import time\ntime.sleep(300)\n", seconds=1)
    with pytest.raises(RuntimeError, match="ran none of made-up's tests and ended with status None"):
        run.main(["--folder", str(tmp_path)], [client], tmp_path)
    assert "made-up: pytest ran more than 1 s" in capsys.readouterr().out


_LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(rank.pid, flush=True)
sys.exit(3) if sys.argv[1] == "ends" else rank.wait()
"""


@pytest.mark.parametrize(("how", "status"), [("ends", 3), ("waits", None)])
def test_ranks_in_sessions_of_their_own_end_with_the_script_they_are_of(
    run: ModuleType, tmp_path: Path, how: str, status: int | None
) -> None:
    """A launcher that leaves its rank behind, and one that waits for it beyond the limit."""
    with (tmp_path / "output").open("w+") as output:
        command = [sys.executable, "-c", _LAUNCHER, how]
        # enough to start Python on a busy machine; the launcher that ends does not hold a pipe, so nothing waits for it
        assert run.ended(command, 5, stdout=output) == (status, "")
        output.seek(0)
        assert not psutil.pid_exists(int(output.read()))


def test_what_a_script_wrote_before_its_limit_is_told(run: ModuleType) -> None:
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(300)"]
    assert run.ended(command, 5, stdout=subprocess.PIPE) == (None, "here\n")


def test_a_process_out_of_reach_that_holds_the_pipe_is_not_waited_for(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_TO_END", 0.2)
    end = run.processes.end_processes
    monkeypatch.setattr(run.processes, "end_processes", lambda spared, seconds: None)  # as if it could not be ended
    before = {child.pid for child in psutil.Process().children()}
    try:
        command = [sys.executable, "-c", "import time; time.sleep(300)"]
        assert run.ended(command, 0.2, stdout=subprocess.PIPE) == (None, "")
    finally:
        end(before, 0)


def test_a_command_that_must_succeed_and_does_not_is_an_error(run: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"ended with status 3, .* Its last output:\nwhy\n"):
        run.succeed([sys.executable, "-c", "print('why'); exit(3)"])
    with pytest.raises(RuntimeError, match=r"ran more than 0\.2 s"):
        run.succeed([sys.executable, "-c", "while True: pass"], 0.2)


def test_adding_to_a_list_keeps_what_stands_there(run: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("# why\nb\n")
    run.passes.add(path, ["c", "a"])
    assert path.read_text() == "# why\na\nb\nc\n"
    assert run.passes.judge(run.passes.read(path), {"a": True, "b": False, "d": True, "e": False}) == run.passes.Verdict(
        lost=("b", "c"), new=("d",), failed=("e",)
    )


def test_every_list_is_of_a_client_at_its_pinned_version(run: ModuleType) -> None:
    pinned = {f"{client.name}-{run.version(client.name)}": client for client in run.CLIENTS}
    lists = {path.stem: run.passes.read(path) for path in _SUITES.glob("*.txt")}
    assert lists
    assert lists.keys() <= pinned.keys()  # a client moved to another version begins a list of its own
    assert all(lists.values())
    with pytest.raises(LookupError, match=r"constraints\.txt does not pin no-such-client"):
        run.version("no-such-client")
