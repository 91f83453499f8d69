"""Run the `deepspeed` command for real, and find every process of a job however it detached itself.

Each job carries a mark in its environment, which all its processes inherit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).parents[2]
GONE_SECONDS = 5.0  # what the launcher promises
_MARK = "DS_TEST_MARK"


def wait_until(claim: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Return once `claim()` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {what}"
        time.sleep(0.02)


class Job:
    """A job started in `folder`: a context that ends it whatever happens in the test.

    `output` is what it has written to stdout and stderr so far. Home and temporary folder are sub-folders of `folder`.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        command: Sequence[str] = (sys.executable, "-m", "deepspeed.launcher.runner"),
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._log = folder / f"output-{self.mark}"
        for name in ("home", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
        base = {name: value for name, value in os.environ.items() if name not in left_out}
        self.environment = {
            **base,
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            _MARK: self.mark,
            **(environment or {}),
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *words],
                cwd=folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=before_exec,  # noqa: PLW1509  only sets signals or a terminal
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """What the job has written so far."""
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float = 60.0) -> int:
        """The exit status, with everything the job wrote in the failure text when it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {seconds} s; it wrote:\n{self.output}") from None

    def processes(self) -> list[psutil.Process]:
        """All processes of the job that have not ended, zombies included when they are ours to reap."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark:
                    found.append(process)
        return found

    def launcher(self) -> psutil.Process:
        """The per-host launcher."""
        return next(process for process in self.processes() if "deepspeed.launcher.launch" in process.cmdline())

    def assert_gone(self, since: float) -> None:
        """Fail unless every process is gone `GONE_SECONDS` after the time `since` (of `time.monotonic`)."""
        left = self.processes()
        while left and time.monotonic() < since + GONE_SECONDS:
            time.sleep(0.02)
            left = self.processes()
        assert not left, f"left after {GONE_SECONDS} s: {[(p.pid, p.cmdline()) for p in left]}; output:\n{self.output}"


def run_job(folder: Path, words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a job to its end: (exit status, output)."""
    with Job(folder, words, environment) as job:
        status = job.wait()
        job.assert_gone(time.monotonic())
        return status, job.output


def ignore(*signums: signal.Signals) -> Callable[[], None]:
    """What a child calls to start with these signals ignored, as under `nohup`."""

    def before_exec() -> None:
        for signum in signums:
            signal.signal(signum, signal.SIG_IGN)

    return before_exec
