"""`deepspeed --elastic_training` on one machine: ranks that fail start anew, so often and no more, and nothing stays.

Ranks are plain Python without torch, so a test takes as long as the launcher alone. Several hosts: `test_elastic_hosts`.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.support.launching import Job, wait_until

SCRIPT = """
import os, sys, time
rank, size, failures = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
with open("starts", "a") as file:
    file.write(f"{rank}/{size} restart {failures}\\n")
mode, times = sys.argv[-2:]
if mode == "fail" and int(failures) < int(times) and rank == "1":
    while f"0/{size} restart {failures}\\n" not in open("starts").read():
        time.sleep(0.01)  # else rank 0 may be ended before it has said that it runs
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(0 if mode == "fail" and int(failures) >= int(times) else 600)
"""


def job(folder: Path, *words: str) -> Job:
    (folder / "script.py").write_text(SCRIPT)
    return Job(folder, ["--elastic_training", "--num_gpus", "2", *words])


def starts(folder: Path) -> list[str]:
    return sorted((folder / "starts").read_text().splitlines()) if (folder / "starts").exists() else []


def test_all_ranks_start_anew_after_a_failure_and_the_job_succeeds(tmp_path: Path) -> None:
    with job(tmp_path, "script.py", "fail", "1") as run:
        assert run.wait() == 0
        assert starts(tmp_path) == ["0/2 restart 0", "0/2 restart 1", "1/2 restart 0", "1/2 restart 1"]
        assert "rank 1 on host localhost failed with exit status 7: all ranks start anew, attempt 1 of 3" in run.output
        run.assert_gone(time.monotonic())


def test_the_job_ends_with_the_ranks_status_when_no_attempt_is_left(tmp_path: Path) -> None:
    with job(tmp_path, "--max_restarts", "1", "script.py", "fail", "9") as run:
        assert run.wait() == 7
        run.assert_gone(time.monotonic())
        assert len(starts(tmp_path)) == 4
        assert "rank 1 on host localhost failed first, with exit status 7; it wrote last:" in run.output
        assert "[rank 1] about to fail" in run.output


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with job(tmp_path, "script.py", "wait", "0") as run:
        wait_until(lambda: len(starts(tmp_path)) == 2, "both ranks run")
        asked = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        run.assert_gone(asked)


def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    with job(tmp_path, "script.py", "wait", "0") as run:
        wait_until(lambda: len(starts(tmp_path)) == 2, "both ranks run")
        killed = time.monotonic()
        run.launcher().kill()
        assert run.wait() == 137
        run.assert_gone(killed)


def test_limits_without_the_flag_are_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    with Job(tmp_path, ["--num_gpus", "1", "--min_elastic_nodes", "1", "script.py"]) as run:
        assert run.wait() == 1
        assert "need --elastic_training" in run.output
