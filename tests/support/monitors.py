"""Read back what monitors wrote, and run them in processes of their own."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from deepspeed.monitor import Event

EVENTS: list[Event] = [
    ("Train/Samples/lr", 0.1, 8),
    ("Train/Samples/train loss", torch.tensor(2.5), 8),
    ("Train/Samples/lr", 0.05, 16),
]


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(s.step, s.value) for s in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def run_script(body: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, in `folder`, with `folder` known as the variable FOLDER."""
    code = f"FOLDER = {str(folder)!r}\n" + textwrap.dedent(body)
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, "HOME": str(folder), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
