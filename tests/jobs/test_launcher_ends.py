"""However a job ends, it ends whole: every process gone within 5 s, the right status, the cause on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launching import GONE_SECONDS, Job, ignore, run_job, wait_until

pytestmark = pytest.mark.alone  # limits of seconds

# A rank that waits for its end, with everything that makes ending it hard: helpers in its group, in a group of their own,
# in a session of their own, and one whose parent is gone. `STUBBORN` ranks ignore requests to end.
WAIT = """
import os, signal, subprocess, sys, time
rank = os.environ["RANK"]
def note(signum, frame):
    open(f"got{rank}", "a").write(signal.Signals(signum).name + " ")
    if rank not in os.environ.get("STUBBORN", ""):
        sys.exit(128 + signum)
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, note)
for detach in ({}, {"process_group": 0} if sys.version_info >= (3, 11) else {}, {"start_new_session": True}):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], **detach)
subprocess.run(["sh", "-c", "setsid sleep 300 & exit 0"])
open(f"ready{rank}", "w").close()
"""
HOLD = WAIT + "while True: time.sleep(300)\n"


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    return script


def _wait_until_ready(folder: Path, job: Job, ranks: int = 2) -> None:
    def ready() -> bool:
        assert job.process.poll() is None, job.output
        return len(list(folder.glob("ready*"))) == ranks

    wait_until(ready, "all ranks are ready")


def _assert_nothing_in_temporary_folder(folder: Path) -> None:
    assert not list((folder / "tmp").iterdir())


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_request_to_end_reaches_every_rank_and_leaves_nothing(
    tmp_path: Path, hold: Path, signum: signal.Signals, status: int
) -> None:
    with Job(tmp_path, ["--save_pid", "--num_gpus", "2", str(hold)]) as job:
        _wait_until_ready(tmp_path, job)
        since = time.monotonic()
        job.process.send_signal(signum)
        assert job.wait() == status, job.output
        job.assert_gone(since)
        assert f"received {signum.name}: ending the job" in job.output
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == [f"{signum.name} "] * 2
    _assert_nothing_in_temporary_folder(tmp_path)


def test_ranks_that_ignore_a_request_are_ended(tmp_path: Path, hold: Path) -> None:
    with Job(tmp_path, ["--num_gpus", "2", str(hold)], {"STUBBORN": "1"}) as job:
        _wait_until_ready(tmp_path, job)
        since = time.monotonic()
        job.process.terminate()
        assert job.wait() == 143, job.output
        job.assert_gone(since)


def test_a_second_request_ends_the_waiting(tmp_path: Path, hold: Path) -> None:
    with Job(tmp_path, ["--num_gpus", "2", str(hold)], {"STUBBORN": "01"}) as job:
        _wait_until_ready(tmp_path, job)
        since = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        wait_until(lambda: (tmp_path / "got0").exists() and (tmp_path / "got1").exists(), "the first request has arrived")
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130, job.output
        assert time.monotonic() - since < 2.5  # GRACE_SECONDS is 3
        job.assert_gone(since)


def test_the_launcher_can_be_asked_as_well(tmp_path: Path, hold: Path) -> None:
    with Job(tmp_path, ["--num_gpus", "2", str(hold)]) as job:
        _wait_until_ready(tmp_path, job)
        since = time.monotonic()
        job.launcher().terminate()
        assert job.wait() == 143, job.output
        job.assert_gone(since)


def test_the_job_does_not_outlive_a_killed_runner(tmp_path: Path, hold: Path) -> None:
    with Job(tmp_path, ["--save_pid", "--num_gpus", "2", str(hold)], {"STUBBORN": "1"}) as job:
        _wait_until_ready(tmp_path, job)
        since = time.monotonic()
        job.process.kill()
        job.process.wait()
        job.assert_gone(since)
    _assert_nothing_in_temporary_folder(tmp_path)


def test_the_job_does_not_outlive_a_killed_launcher(tmp_path: Path, hold: Path) -> None:
    with Job(tmp_path, ["--save_pid", "--num_gpus", "2", str(hold)], {"STUBBORN": "01"}) as job:
        _wait_until_ready(tmp_path, job)
        since = time.monotonic()
        job.launcher().kill()
        assert job.wait() == 137, job.output
        job.assert_gone(since)
        assert "the launcher was ended by signal 9 (SIGKILL)" in job.output
    _assert_nothing_in_temporary_folder(tmp_path)


def test_a_killed_launcher_that_nobody_watches_takes_its_ranks_along(tmp_path: Path, hold: Path) -> None:
    from deepspeed.launcher.hostfile import encode_world_info

    words = [f"--world_info={encode_world_info({'localhost': [0, 1]})}", str(hold)]
    with Job(tmp_path, words, {"STUBBORN": "01"}, command=[sys.executable, "-m", "deepspeed.launcher.launch"]) as job:
        _wait_until_ready(tmp_path, job)
        ranks = [process for process in job.launcher().children() if "hold.py" in " ".join(process.cmdline())]
        assert len(ranks) == 2
        job.process.kill()
        job.process.wait()
        assert not psutil.wait_procs(ranks, timeout=GONE_SECONDS)[1]


FAIL = (
    WAIT
    + """
if rank == "1":
    while not os.path.exists("go"): time.sleep(0.01)
    print("progress 1%\\rprogress 99%")
    {fail}
while True: time.sleep(300)
"""
)


@pytest.mark.parametrize(
    ("fail", "status", "told"),
    [
        ("sys.exit(7)", 7, ["rank 1 failed first, with exit status 7", "[rank 1] progress 99%"]),
        ("raise ValueError('no such thing')", 1, ["with exit status 1", "[rank 1] ValueError: no such thing"]),
        ("os.kill(os.getpid(), 9)", 137, ["with signal 9 (SIGKILL), which the kernel sends when memory runs out"]),
        ("os.abort()", 134, ["with signal 6 (SIGABRT)"]),
    ],
)
def test_a_failed_rank_ends_the_job_with_its_status_and_its_last_lines(
    tmp_path: Path, fail: str, status: int, told: list[str]
) -> None:
    (tmp_path / "fail.py").write_text(FAIL.replace("{fail}", fail))
    with Job(tmp_path, ["--num_gpus", "3", "fail.py"], {"STUBBORN": "0"}) as job:
        _wait_until_ready(tmp_path, job, ranks=3)
        since = time.monotonic()
        (tmp_path / "go").touch()
        assert job.wait() == status, job.output
        job.assert_gone(since)
        report = job.output[job.output.rindex("failed first") - 10 :]
        assert [line for line in told if line not in report] == []
        assert report.count("[rank 0]") == report.count("[rank 2]") == 0
    assert (tmp_path / "got2").read_text() == "SIGTERM "


def test_the_report_names_the_log_of_the_failed_rank(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("import sys; print('deep trouble'); sys.exit(3)")
    status, output = run_job(tmp_path, ["--enable_each_rank_log", "logs", "fail.py"])
    assert status == 3
    assert "all of it is in logs/" in output
    assert "[rank 0] deep trouble" in output


def test_a_job_that_ends_well_is_not_held_up_and_what_ranks_leave_behind_is_ended(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text(
        "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True); print('done')"
    )
    status, output = run_job(tmp_path, ["--num_gpus", "2", "leave.py"])
    assert status == 0
    assert "ranks left processes behind, which are ended now" in output


def test_shared_memory_of_a_killed_rank_is_freed(tmp_path: Path) -> None:
    (tmp_path / "share.py").write_text(
        "import os, time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "block = SharedMemory(create=True, size=4096)\n"
        "open('name', 'w').write(block.name)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    status, output = run_job(tmp_path, ["share.py"])
    assert status == 137, output
    assert not (Path("/dev/shm") / (tmp_path / "name").read_text()).exists()


def test_a_hang_up_is_ignored_under_nohup(tmp_path: Path) -> None:
    (tmp_path / "go.py").write_text(
        "import os, time\nopen('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.02)\nprint('went on')\n"
    )
    with Job(tmp_path, ["go.py"], before_exec=ignore(signal.SIGHUP)) as job:
        _wait_until_ready(tmp_path, job, ranks=1)
        job.process.send_signal(signal.SIGHUP)
        job.launcher().send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.output
        assert "went on" in job.output


def test_a_terminals_interrupt_key_ends_the_job_once(tmp_path: Path, hold: Path) -> None:
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    with Job(tmp_path, ["--num_gpus", "2", str(hold)], before_exec=take_terminal) as job:
        os.close(theirs)
        _wait_until_ready(tmp_path, job)
        since = time.monotonic()
        os.write(ours, b"\x03")
        assert job.wait() == 130, job.output
        job.assert_gone(since)
    os.close(ours)
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == ["SIGINT "] * 2


def test_a_program_can_start_a_job_in_a_thread_and_keeps_its_other_children(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("import os; os.kill(os.getppid(), 9)")
    (tmp_path / "program.py").write_text(
        "import subprocess, threading\n"
        "from deepspeed.launcher.runner import parse_args, run\n"
        "other = subprocess.Popen(['sleep', '300'])\n"
        "thread = threading.Thread(target=lambda: print('status', run(parse_args(['fail.py']))))\n"
        "thread.start(); thread.join()\n"
        "print('other', other.poll())\n"
        "other.kill(); other.wait()\n"
    )
    with Job(tmp_path, ["program.py"], command=[sys.executable]) as job:
        assert job.wait() == 0, job.output
        assert [line for line in job.output.splitlines() if line[:6] in ("status", "other ")] == ["status 137", "other None"]
        job.assert_gone(time.monotonic())
