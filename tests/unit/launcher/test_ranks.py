"""`launcher.ranks`: what becomes of ranks, tried on small processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed.launcher.output import LogFile, finish
from deepspeed.launcher.placement import RankPlace
from deepspeed.launcher.ranks import Command, Rank, reap, start_rank, stop
from tests.support.launching import wait_until

# A rank that says when it is ready, and when it is asked to end.
NOTES = """
import signal, sys, time
def note(signum, frame):
    open("got", "w").write(signal.Signals(signum).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, note)
open("ready", "w").close()
while True: time.sleep(300)
"""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.chdir(tmp_path)
    command = Command(RankPlace(3, 0, 4, 1, 0, 1), [sys.executable, "-c", NOTES], dict(os.environ))
    rank = start_rank(command, LogFile(tmp_path / "log"))
    rank.output.started()
    wait_until((tmp_path / "ready").exists, "the rank is ready")
    yield rank
    with contextlib.suppress(ProcessLookupError):  # `end_the_rest` ends every child, and this process has others to keep
        os.killpg(rank.process.pid, signal.SIGKILL)
    rank.process.wait()
    finish([rank.output], time.sleep)


def _becomes(rank: Rank, *, is_stopped: bool) -> None:
    def has_become() -> bool:
        reap([rank])
        return rank.is_stopped is is_stopped

    wait_until(has_become, f"stopped: {is_stopped}")


def test_a_rank_that_is_stopped_is_settled_and_when_it_goes_on(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        rank.process.send_signal(signal.SIGSTOP)
        _becomes(rank, is_stopped=True)
        assert rank.exit_status is None
        assert f"rank 3 (process {rank.process.pid} on " in caplog.text
        assert f"was stopped by SIGSTOP, and the others wait for it: `kill -CONT {rank.process.pid}`" in caplog.text
        rank.process.send_signal(signal.SIGCONT)
        _becomes(rank, is_stopped=False)
        assert "goes on" in caplog.text


def test_a_stopped_rank_hears_that_it_is_to_end(rank: Rank, tmp_path: Path) -> None:
    rank.process.send_signal(signal.SIGSTOP)
    _becomes(rank, is_stopped=True)

    def wait(_seconds: float) -> bool:
        time.sleep(0.01)
        reap([rank])
        return False

    stop([rank], signal.SIGTERM, wait)
    assert rank.exit_status == 0
    assert (tmp_path / "got").read_text() == "SIGTERM"


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 6, "SIGRTMIN+6")])
def test_the_end_by_any_signal_has_a_name(rank: Rank, number: int, name: str) -> None:
    rank.process.send_signal(number)

    def has_ended() -> bool:
        return bool(reap([rank]))

    wait_until(has_ended, "the rank has ended")
    assert rank.exit_status == 128 + number
    assert f"signal {int(number)} ({name})" in rank.how_it_ended
