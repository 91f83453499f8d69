"""A job whose command or whose ranks are stopped (Ctrl-Z, SIGSTOP) for a while or for good, on one machine."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.support.launching import GONE_SECONDS, Job, wait_until

pytestmark = pytest.mark.alone  # limits of seconds

TICK = """
import os, signal, sys, time
rank = os.environ["RANK"]
def note(signum, frame):
    open(f"got{rank}", "w").write(signal.Signals(signum).name)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, note)
open(f"pid{rank}", "w").write(str(os.getpid()))
while not os.path.exists("go"):
    with open(f"ticks{rank}", "a") as file: file.write("x")
    time.sleep(0.02)
"""


def _ticks(folder: Path, ranks: int = 2) -> list[int]:
    paths = [folder / f"ticks{rank}" for rank in range(ranks)]
    return [path.stat().st_size if path.exists() else 0 for path in paths]


def _wait_until_ranks_live(folder: Path) -> None:
    before = _ticks(folder)
    wait_until(lambda: all(now > then + 3 for now, then in zip(_ticks(folder), before, strict=True)), "both ranks live")


# A shell with job control, as far as Ctrl-Z and fg go: it starts a command in the foreground of its terminal.
SHELL = """
import os, signal, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
_, status = os.waitpid(pid, os.WUNTRACED)
os.tcsetpgrp(terminal, os.getpgrp())
open("stopped", "w").write(signal.Signals(os.WSTOPSIG(status)).name)
while not os.path.exists("on"): time.sleep(0.02)
os.tcsetpgrp(terminal, pid)
os.killpg(pid, signal.SIGCONT)
_, status = os.waitpid(pid, 0)
open("ended", "w").write(str(os.waitstatus_to_exitcode(status)))
"""


def test_ctrl_z_stops_the_command_alone_and_fg_lets_it_go_on(tmp_path: Path) -> None:
    (tmp_path / "tick.py").write_text(TICK)
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    words = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "tick.py"]
    with Job(tmp_path, words, command=[sys.executable, "-c", SHELL, sys.executable], before_exec=take_terminal) as job:
        os.close(theirs)
        _wait_until_ranks_live(tmp_path)
        os.write(ours, b"\x1a")
        wait_until((tmp_path / "stopped").exists, "the shell has its terminal back")
        wait_until(lambda: (tmp_path / "stopped").read_text() == "SIGTSTP", "by Ctrl-Z")
        _wait_until_ranks_live(tmp_path)
        (tmp_path / "on").touch()
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.output
        job.assert_gone(time.monotonic())
    os.close(ours)
    assert (tmp_path / "ended").read_text() == "0"


def test_a_job_that_ended_while_its_command_was_stopped_has_its_status(tmp_path: Path) -> None:
    (tmp_path / "tick.py").write_text(f"{TICK}\nsys.exit(7)")
    with Job(tmp_path, ["--num_gpus", "2", "tick.py"]) as job:
        _wait_until_ranks_live(tmp_path)
        job.process.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        wait_until(lambda: "failed first" in job.output, "the job has ended")
        job.process.send_signal(signal.SIGCONT)
        assert job.wait() == 7, job.output
        job.assert_gone(time.monotonic())


def test_a_stopped_rank_is_settled_and_ends_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "tick.py").write_text(TICK)
    with Job(tmp_path, ["--num_gpus", "2", "tick.py"]) as job:
        _wait_until_ranks_live(tmp_path)
        pid = int((tmp_path / "pid1").read_text())
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: f"rank 1 (process {pid} on " in job.output, "the launcher tells of it")
        assert f"was stopped by SIGSTOP, and the others wait for it: `kill -CONT {pid}` lets it go on" in job.output
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: ") goes on" in job.output, "the launcher tells of that too")
        _wait_until_ranks_live(tmp_path)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: job.output.count("was stopped") == 2, "the launcher knows")
        since = time.monotonic()
        job.process.terminate()
        assert job.wait() == 143, job.output
        job.assert_gone(since)
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


TRAIN = """
import os, torch, deepspeed
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
open(f"pid{rank}", "w").write(str(os.getpid()))
while True:
    deepspeed.comm.all_reduce(torch.ones(1000))
    with open(f"ticks{rank}", "a") as file: file.write("x")
"""


@pytest.mark.parametrize("stopped", [1, 0])
def test_a_rank_that_is_stopped_for_good_ends_the_job_within_seconds(tmp_path: Path, stopped: int) -> None:
    """Rank 0 serves the store over which ranks compare where they stand."""
    (tmp_path / "train.py").write_text(TRAIN)
    with Job(tmp_path, ["--num_gpus", "2", "train.py"]) as job:
        _wait_until_ranks_live(tmp_path)
        wait_until(lambda: min(_ticks(tmp_path)) > 100, "ranks repeat themselves")
        pid = int((tmp_path / f"pid{stopped}").read_text())
        since = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        assert job.wait(30) == 1, job.output
        assert time.monotonic() - since < 4 + 3 + GONE_SECONDS, (
            "sure after 4 s, then the end of an interpreter, then the job's"
        )
        job.assert_gone(time.monotonic())
        assert f"rank {1 - stopped} failed first, with exit status 1" in job.output
        assert f"rank {stopped} (process {pid}) of this host is stopped by a signal (SIGSTOP or SIGTSTP)" in job.output
