"""How soon does `deepspeed plan` answer for a model of 70e9 parameters?

Goals: a bare number of parameters takes at most 0.5x of what `import torch` takes, which it does without; a Hugging Face
configuration at most 1.6x of loading the model's class, without which there is nothing to trace.

Measured as user and system time of whole commands, each in a process of its own, started as a user types it. The class is
loaded, and torch is imported, in the same way. A figure is the median of `TIMES` starts that follow each other, after one
that is not counted and fills the caches of files.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import OURS, Case, Goal, Measured
from benchmarks.harness.probes import processor_seconds

TORCH, CLASS = "import torch", "load the class"
TIMES = 3

_NAME = __name__.rpartition(".")[2]
CASES = (
    Case(
        "plan_time number",
        benchmark=_NAME,
        contenders=(OURS, TORCH),
        figures=("cpu_s",),
        of=TORCH,
        goals=(Goal("cpu_s", 0.5, TORCH),),
        pairs=3,
        arguments={"model": None},
    ),
    Case(
        "plan_time Llama",
        benchmark=_NAME,
        contenders=(OURS, CLASS, TORCH),
        figures=("cpu_s",),
        of=CLASS,
        goals=(Goal("cpu_s", 1.6, CLASS),),
        pairs=3,
        arguments={
            "model": {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
            }
        },
    ),
)
_WORDS = ("--world-size", "64", "--device-memory", "80GB", "--json")


def measure(contender: str, arguments: Mapping[str, Any]) -> Measured:
    model = arguments["model"]
    with tempfile.TemporaryDirectory() as folder:
        source = ["--params", "70e9"]
        if model is not None:
            Path(folder, "config.json").write_text(json.dumps(model))
            source = [str(Path(folder, "config.json"))]
        commands = {
            OURS: ["-m", "deepspeed.launcher.runner", "plan", *source, *_WORDS],
            TORCH: ["-c", "import torch"],
            CLASS: ["-c", "import transformers; transformers.LlamaForCausalLM"],
        }
        taken = [_taken([sys.executable, *commands[contender]], folder) for _ in range(1 + TIMES)][1:]
    import torch  # noqa: F401

    import deepspeed  # noqa: F401  for the versions in the table

    return Measured({"cpu_s": statistics.median(taken)})


def _taken(command: list[str], folder: str) -> float:
    """Processor seconds of a command."""
    began = processor_seconds()
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-300:]}")
    return processor_seconds() - began
