"""How long does it take to turn a checkpoint into plain fp32 weights, and how much memory?

Goal: the command `zero_to_fp32` in at most 0.4x the original's time, with at most a quarter of its memory.

Two ranks train the model of `checkpoint` for one step and save it; then the first rank runs the command on that checkpoint,
whose files are in the page cache, and flushes what it wrote (fsync), within the time.

    export_s     from the start of the command until its files are on the disk
    peak_mib     the most that was resident in the command (`ru_maxrss`). A small process starts it: the figure of a process
                 begins with what the one that started it held
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.checkpoint import MODEL, EngineCheckpoints, files_of, flush, read_all
from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured
from benchmarks.harness.trainers import join, rank

_STARTER = """
import os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - began, usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
_ROOT = Path(__file__).resolve().parents[1]


def _case(stage: int) -> Case:
    return Case(
        f"checkpoint_export stage {stage}",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, ORIGINAL),
        figures=("export_s", "peak_mib"),
        of=ORIGINAL,
        ranks=2,
        goals=(Goal("export_s", 0.4, of=ORIGINAL), Goal("peak_mib", 0.25, of=ORIGINAL)),
        pairs=3,
        arguments={"dtype": "bf16", "stage": stage, "rows": 1, "model": MODEL},
    )


CASES = tuple(_case(stage) for stage in (1, 2, 3))


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    folder = Path(arguments["scratch"])
    join(contender)
    EngineCheckpoints(contender, arguments, folder / "checkpoints").save("t")
    read_all(folder / "checkpoints")
    dist.barrier()
    figures = _export(contender, folder) if rank() == 0 else {"export_s": 0.0, "peak_mib": 0.0}
    dist.barrier()
    return Measured(figures)


def _export(contender: str, folder: Path) -> dict[str, float]:
    weights = folder / "weights"
    # in a folder of its own: with `-m`, what lies in the current one would be found first
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD_SIZE" not in name}
    if contender == OURS:
        environment["PYTHONPATH"] = str(_ROOT)
    command = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(folder / "checkpoints"), str(weights)]
    starting = [sys.executable, "-c", _STARTER, *command]
    done = subprocess.run(starting, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    command_s, peak_kib = map(float, done.stdout.split()[-2:])
    began = time.perf_counter()
    files = files_of(weights) if weights.is_dir() else [weights]
    for file in files:
        flush(file)
    return {"export_s": command_s + time.perf_counter() - began, "peak_mib": peak_kib / 1024}
