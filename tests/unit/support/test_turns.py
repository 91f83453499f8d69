from __future__ import annotations

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.launching import ROOT, wait_until
from tests.support.turns import turn


def _somebody_waits_alone(folder: Path) -> bool:
    """Whether the gate is held, which it is only for a moment unless its holder waits for the others to end."""
    with (folder / "gate").open("w") as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_others_run_side_by_side(tmp_path: Path) -> None:
    with turn(tmp_path, alone=False), turn(tmp_path, alone=False):  # else this would wait for ever
        pass


def test_one_that_runs_alone_begins_when_the_others_have_ended_and_before_those_that_come_later(tmp_path: Path) -> None:
    events = []

    def run(name: str, *, alone: bool) -> None:
        with turn(tmp_path, alone=alone):
            events.append(name)

    with ThreadPoolExecutor(2) as threads:
        with turn(tmp_path, alone=False):
            first = threads.submit(run, "alone", alone=True)
            wait_until(lambda: _somebody_waits_alone(tmp_path), "it waits")
            second = threads.submit(run, "later", alone=False)
            events.append("at first")
        first.result()
        second.result()
    assert events == ["at first", "alone", "later"]


SUITE = """
import os, time
import pytest

def _run(name):
    with open(os.environ["EVENTS"], "a") as events:  # a line at a time
        events.write(f"begin {name}\\n")
        events.flush()
        time.sleep(0.05)
        events.write(f"end {name}\\n")

@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    _run("alone")

@pytest.mark.parametrize("number", range(5))
def test_beside_others(number):
    _run("other")
"""


def test_workers_keep_to_the_marks(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_configure_node, pytest_runtest_protocol\n")
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (tmp_path / name).write_text(SUITE)
    events = tmp_path / "events"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "EVENTS": str(events), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = events.read_text().splitlines()
    assert lines.count("begin alone") == 9
    assert lines.count("begin other") == 15
    assert all(lines[at + 1] == "end alone" for at, line in enumerate(lines) if line == "begin alone")
