"""Start the ranks of one run as fresh processes, wait for them, and read what they measured.

    driver --- JOB.json ---> worker.py x ranks --- result.RANK.json ---> Run (worst rank)

Ranks get torchrun's variables, one thread each, the CPU accelerator, and a folder for compiled operators that belongs to the
contender: kept between runs for the original, which compiles for minutes, and empty for everybody else, which shows that
nothing is compiled. Every process is the leader of a session of its own and is ended with what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness.cases import AGAIN, ORIGINAL, OURS, Case, Measured, Run, merge

_WORKER = Path(__file__).with_name("worker.py")
_ADDRESS = "127.0.0.1"
_GRACE_SECONDS = 2.0  # for the peers of a rank that failed to write their own error
_PATH = re.compile(r"(?:/[\w.+-]+)+/")  # of this machine: no part of a result


@dataclass(frozen=True)
class Interpreters:
    """Which Python runs which contender, and where the original keeps what it compiled."""

    work: Path
    peer: str | None = None

    def python(self, contender: str) -> str:
        """The interpreter of `contender`; only the original has one of its own."""
        if contender != ORIGINAL:
            return sys.executable
        if self.peer is None:
            raise ValueError("the original has no interpreter: give --peer PATH_TO_PYTHON, or leave the contender out.")
        return self.peer

    def compiled(self, contender: str, scratch: Path, *, is_cold: bool) -> Path:
        """Folder for compiled operators; without locks of builds that were stopped, for which every later one would wait."""
        if contender != ORIGINAL or is_cold:
            return scratch / "compiled"
        folder = self.work / "compiled-by-original"
        for lock in folder.rglob("lock"):
            if not _is_being_built(lock.resolve()):
                lock.unlink(missing_ok=True)
        return folder


def _is_being_built(lock: Path) -> bool:
    """Whether the process that made the lock lives, which keeps it open, or a compiler of its, which works beside it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
            if process.cwd() == str(lock.parent) or any(file.path == str(lock) for file in process.open_files()):
                return True
    return False


def run_case(
    case: Case, contender: str, pair: int, interpreters: Interpreters, *, timeout_seconds: float = 300, is_cold: bool = False
) -> Run:
    """Run `contender` once. A failure is a Run with an error, never an exception."""
    interpreters.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=interpreters.work, prefix="run-") as name:
        scratch = Path(name)
        job = scratch / "job.json"
        arguments = {**case.arguments, "scratch": name}
        who = OURS if contender == AGAIN else contender
        job.write_text(json.dumps({"benchmark": case.benchmark, "contender": who, "arguments": arguments}))
        python = interpreters.python(who)
        compiled = interpreters.compiled(who, scratch, is_cold=is_cold)
        compiled.mkdir(exist_ok=True)
        port = _free_port()
        shared = _environment(python, case.ranks, port, compiled)
        began = time.perf_counter()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(case.ranks):
                with (scratch / f"log.{rank}").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [python, str(_WORKER), str(job)],
                            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            problem = _wait(processes, began + timeout_seconds)
        finally:
            for process in processes:
                _end(process)
            if who == ORIGINAL:
                remove_segments(port)
        wall_seconds = time.perf_counter() - began
        return _read(case, contender, pair, scratch, wall_seconds, problem)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_ADDRESS, 0))
        return int(free.getsockname()[1])


def remove_segments(port: int, folder: Path = Path("/dev/shm")) -> None:
    """Remove the shared memory that ranks of the original leave behind, 66 MiB each; ours leave none."""
    for segment in folder.glob(f"deepspeed_*_{_ADDRESS}_{port}_*"):
        segment.unlink()


def _environment(python: str, ranks: int, port: int, compiled: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),  # how the original on CPU asks for the same
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(compiled),
        "PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Wait until all ranks are done, or one failed and the others had time to say why, or time is up."""
    while any(process.poll() is None for process in processes):
        if time.perf_counter() > deadline:
            return "not done in time; its last line"
        if any(process.poll() not in (None, 0) for process in processes):
            time.sleep(_GRACE_SECONDS)
            return "a rank failed; its last line"
        time.sleep(0.02)
    failed = [process.returncode for process in processes if process.returncode]
    return f"ended with {failed}; last line" if failed else None


def _end(process: subprocess.Popen[bytes]) -> None:
    from deepspeed.launcher.processes import (
        signal_all,
    )  # ours alone has it; workers import this file under the original, too

    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)  # ninja gives each compiler a group of its own
        os.killpg(process.pid, signal.SIGKILL)
        signal_all(below, signal.SIGKILL)
    process.wait()


def _read(case: Case, contender: str, pair: int, scratch: Path, wall_seconds: float, problem: str | None) -> Run:
    files = [scratch / f"result.{rank}.json" for rank in range(case.ranks)]
    results: list[Mapping[str, Mapping[str, float]]] = [json.loads(f.read_text()) for f in files if f.exists()]
    errors = [str(result["error"]) for result in results if "error" in result]
    if problem is not None and not errors:
        lines = "\n".join(log.read_text(errors="replace").strip() for log in scratch.glob("log.*")).splitlines()
        errors = [f"{problem}: {lines[-1] if lines else 'nothing was printed'}"]
    if errors:
        return Run(case.title, contender, pair, wall_seconds, error=_PATH.sub("", errors[0])[:300])
    measured = merge([Measured(dict(result["figures"]), dict(result["losses"])) for result in results])
    measured.figures["process_s"] = wall_seconds
    versions = {key: str(value) for key, value in results[0]["versions"].items()}
    return Run(case.title, contender, pair, wall_seconds, measured, versions)
