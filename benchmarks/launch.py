"""What does it cost to start a script through the launcher, on one machine?

Goals: the first line of the script runs at most 0.6x as late as under the original, and a whole job of an empty script takes
at most 0.4x as long. torchrun is shown beside.

Measured from the start of the command, as a user types it, to the script's first line (`first_line_s`: the script writes the
time down) and to the end of the command (`job_s`). The script does nothing else, so this is the launcher alone. A figure is
the median of `TIMES` starts that follow each other, after one that is not counted and fills the caches of files.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import ORIGINAL, OURS, Case, Goal, Measured

TORCHRUN = "torchrun"
TIMES = 3

CASES = (
    Case(
        "launch",
        benchmark=__name__.rpartition(".")[2],
        contenders=(OURS, ORIGINAL, TORCHRUN),
        figures=("first_line_s", "job_s"),
        of=ORIGINAL,
        goals=(Goal("first_line_s", 0.6, ORIGINAL), Goal("job_s", 0.4, ORIGINAL)),
        pairs=3,
        side_pairs=3,
        arguments={"ranks": 2},
    ),
)

_COMMANDS = {
    OURS: ("deepspeed.launcher.runner", "--num_gpus"),
    ORIGINAL: ("deepspeed.launcher.runner", "--num_gpus"),
    TORCHRUN: ("torch.distributed.run", "--nproc_per_node"),
}

_LATEST_PORT = 29999
_SCRIPT = "import os, time\nopen('began' + os.environ['RANK'], 'w').write(repr(time.time()))\n"


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    module, count = _COMMANDS[contender]
    ranks = arguments["ranks"]
    command = [sys.executable, "-m", module, count, str(ranks), "--master_port", str(_LATEST_PORT), "empty.py"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "empty.py").write_text(_SCRIPT)
        taken = [_start(command, Path(folder), ranks) for _ in range(1 + TIMES)][1:]
    import torch  # noqa: F401

    import deepspeed  # noqa: F401  for the versions in the table

    first_lines, jobs = zip(*taken, strict=True)
    return Measured({"first_line_s": statistics.median(first_lines), "job_s": statistics.median(jobs)})


def _start(command: list[str], folder: Path, ranks: int) -> tuple[float, float]:
    """Seconds to the first line of the last rank, and to the end of the command."""
    places = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    environment["DS_ACCELERATOR"] = "cpu"
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-300:]}")
    return max(float((folder / f"began{rank}").read_text()) for rank in range(ranks)) - began, ended - began
