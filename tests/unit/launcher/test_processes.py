from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from deepspeed.launcher.processes import (
    SignalInbox,
    adopting_orphans,
    descendants,
    end_processes,
    signal_name,
    start_process,
)
from tests.support.ranks import helper_pids

pytestmark = pytest.mark.alone  # limits of seconds


def test_signals_wait_in_the_inbox_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SignalInbox(signal.SIGUSR1, signal.SIGUSR2) as inbox:
        assert inbox.wait(0) == []
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert sorted(inbox.wait(5)) == [signal.SIGUSR1, signal.SIGUSR2]
        assert inbox.wait(0) == []
    assert signal.getsignal(signal.SIGUSR1) is before


def test_an_ignored_request_stays_ignored_and_the_end_of_a_child_does_not() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with SignalInbox(signal.SIGHUP, signal.SIGCHLD) as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            child = subprocess.Popen(["true"])
            assert inbox.wait(5) == [signal.SIGCHLD]
            assert child.wait() == 0
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGCHLD, before[1])


def test_descendants_end_even_detached_and_stubborn_ones_and_others_are_spared() -> None:
    other = subprocess.Popen(["sleep", "300"])
    kept = {other.pid, *helper_pids()}  # the test run's own helpers are needed by the tests to come
    stubborn = "trap '' TERM; setsid sleep 300 & echo; while :; do sleep 1; done"
    with adopting_orphans():
        job = start_process(["sh", "-c", stubborn], dict(os.environ), signal.SIGKILL, stdout=subprocess.PIPE)
        assert job.stdout is not None
        with job.stdout as output:
            output.readline()
        assert len(descendants()) >= 3
        since = time.monotonic()
        end_processes(spared=kept, seconds=0.1)
        assert time.monotonic() - since < 2
    assert {child.pid for child in psutil.Process().children(recursive=True)} - kept == set()
    assert other.poll() is None
    other.kill()
    other.wait()
    job.returncode = -signal.SIGKILL  # reaped above, behind the back of Popen


def test_a_started_process_leads_a_session_and_may_be_bound_to_cores() -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.getsid(0) == os.getpid(), sorted(os.sched_getaffinity(0)))"
    process = start_process([sys.executable, "-c", code], {}, signal.SIGKILL, stdout=subprocess.PIPE, cores=[core])
    assert process.communicate()[0].decode() == f"True [{core}]\n"


def test_a_command_that_does_not_exist_raises() -> None:
    with pytest.raises(FileNotFoundError):
        start_process(["/nowhere/none"], {}, signal.SIGKILL)


def test_a_process_that_this_user_may_not_end_does_not_save_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = (subprocess.Popen(["sleep", "300"]) for _ in range(2))
    real = psutil.Process.send_signal

    def send(process: psutil.Process, signum: int) -> None:
        if process.pid == theirs.pid:
            raise psutil.AccessDenied(process.pid)
        real(process, signum)

    monkeypatch.setattr(psutil.Process, "send_signal", send)
    try:
        end_processes(spared=helper_pids(), seconds=0)
        assert not psutil.pid_exists(ours.pid)
        assert theirs.poll() is None
    finally:
        theirs.kill()
        theirs.wait()
        ours.wait()


def test_every_signal_has_a_name() -> None:
    names = {number: signal_name(number) for number in signal.valid_signals()}
    assert (names[signal.SIGTERM], names[signal.SIGRTMIN + 1]) == ("SIGTERM", "SIGRTMIN+1")
    assert len(set(names.values())) == len(names)
