"""Start a script of the examples on this machine's devices, as a person would at the prompt.

Used by the `run.py` of this example and of `examples/moe`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from deepspeed.accelerator import get_accelerator

CPU_RANKS = 2


def launch(script: list[str]) -> int:
    """Start `script` through the launcher and wait; returns its exit status."""
    environment = dict(os.environ)
    flags = []
    if get_accelerator().device_name() == "cpu":
        flags = ["--num_gpus", str(CPU_RANKS)]
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // CPU_RANKS)))
    print(f"$ {shlex.join(['deepspeed', *flags, *script])}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", *flags, *script], env=environment, check=False
    ).returncode
