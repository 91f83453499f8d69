"""`run_guarded` forks and waits for all children, so each test runs it in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.launching import ROOT, wait_until

_GUARD = """
import os, signal, subprocess, sys, time
from deepspeed.launcher.guard import run_guarded
def body():
    {body}
print("status", run_guarded(body), os.getpid() == {{}}, flush=True)
"""

# The child: starts a helper that nothing but its parent's care would end, and says who is who.
_HOLD = """
    helper = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with open("pids", "w") as file: file.write(f"{os.getpid()} {helper.pid}\\n")
    {then}
    time.sleep(300)
"""


def _start(folder: Path, body: str) -> subprocess.Popen[bytes]:
    code = _GUARD.replace("{body}", body.strip()).replace("{{}}", "int(open('guard').read())")
    code = "import os; open('guard', 'w').write(str(os.getpid()))\n" + code
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=-1)


def _pids(folder: Path) -> tuple[int, int]:
    path = folder / "pids"
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), "the child has started")
    child, helper = map(int, path.read_text().split())
    return child, helper


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("body", "status"), [("return 0", 0), ("return 7", 7), ("raise ValueError('no')", 1)])
def test_the_status_is_what_the_body_returns(tmp_path: Path, body: str, status: int) -> None:
    process = _start(tmp_path, body)
    assert process.communicate(timeout=60)[0].decode().split() == ["status", str(status), "True"]


def test_a_killed_child_leaves_nothing_and_its_signal_is_the_status(tmp_path: Path) -> None:
    process = _start(tmp_path, _HOLD.replace("{then}", ""))
    child, helper = _pids(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert process.communicate(timeout=60)[0].decode().split()[1] == "137"
    assert _is_gone(helper)


def test_a_killed_guard_asks_the_child_to_end(tmp_path: Path) -> None:
    process = _start(
        tmp_path, _HOLD.replace("{then}", "signal.signal(signal.SIGTERM, lambda *_: (helper.kill(), sys.exit(0)))")
    )
    child, helper = _pids(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: _is_gone(child) and _is_gone(helper), "child and helper have ended")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_goes_to_the_child_which_answers(tmp_path: Path, signum: signal.Signals) -> None:
    answer = f"signal.signal({int(signum)}, lambda *_: (helper.kill(), os._exit(9)))"
    process = _start(tmp_path, _HOLD.replace("{then}", answer + "; open('ready', 'w').close()"))
    _pids(tmp_path)
    wait_until((tmp_path / "ready").exists, "the handler is there")
    process.send_signal(signum)
    assert process.communicate(timeout=60)[0].decode().split()[1] == "9"


def test_a_request_before_the_body_has_handlers_ends_the_child(tmp_path: Path) -> None:
    process = _start(tmp_path, _HOLD.replace("{then}", ""))
    _pids(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0].decode().split()[1] == "130"
