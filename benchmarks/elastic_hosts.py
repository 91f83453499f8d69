"""The picture of docs/guide/elastic.md: three hosts, one killed without a word, booted again later, against one process.

    python -m benchmarks.elastic_hosts [--out docs/guide/elastic.png]

Needs root (hosts out of namespaces, tests/support/hosts.py) and matplotlib. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.hosts import Hosts, hosts
from tests.support.launching import ROOT, Job

SCRIPT = ROOT / "examples" / "elastic" / "train.py"
STEPS = 140
COLORS = {2: "#c1502e", 3: "#2a6f97"}
Records = list[dict[str, Any]]


def read(run: Path) -> Records:
    path = run / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(claim: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + 90
    while not claim():
        if time.monotonic() > deadline:
            sys.exit(f"the job does not get on:\n{job.output}")
        time.sleep(0.1)


def run_on_hosts(cluster: Hosts, folder: Path) -> tuple[Records, dict[str, float]]:
    """The steps of the elastic run, and when what was done to it, in seconds since 1970."""
    run = folder / "run"
    run.mkdir()
    command = cluster[1].command(sys.executable, "-m", "deepspeed.launcher.runner", folder=folder)
    words = ["-H", str(cluster.hostfile), "--elastic_training", "1:3", str(SCRIPT)]
    words += ["--run", str(run), "--steps", str(STEPS), "--save-every", "10", "--seconds-per-step", "0.3"]
    done = {}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with Job(folder, words, {"PATH": path}, command=command) as job:
        until(lambda: len(read(run)) >= 36, job)
        done["node3 is killed"] = time.time()
        cluster[3].kill()
        until(lambda: sum(record["ranks"] == 2 for record in read(run)) >= 20, job)
        done["node3 boots"] = time.time()
        cluster[3].boot()
        if job.wait(180) != 0:
            sys.exit(job.output)
    return read(run), done


def run_alone(folder: Path) -> Records:
    run = folder / "alone"
    run.mkdir()
    argv = [sys.executable, str(SCRIPT), "--run", str(run), "--steps", str(STEPS)]
    subprocess.run(argv, check=True, stderr=subprocess.DEVNULL, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    return read(run)


def draw(alone: Records, elastic: Records, done: dict[str, float], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), layout="constrained")
    loss, progress = figure.subplots(2, 1)
    loss.plot(
        [r["step"] for r in alone],
        [r["loss"] for r in alone],
        color="#c8d1da",
        linewidth=5,
        label="one process, never stopped",
    )
    begins = [0, *(n for n in range(1, len(elastic)) if elastic[n]["step"] != elastic[n - 1]["step"] + 1), len(elastic)]
    began = elastic[0]["time"]
    shown = set()
    for start, stop in pairwise(begins):
        part = elastic[start:stop]
        ranks = part[0]["ranks"]
        label = "" if ranks in shown else f"{ranks} hosts"
        shown.add(ranks)
        loss.plot([r["step"] for r in part], [r["loss"] for r in part], color=COLORS[ranks], linewidth=1.3, label=label)
        progress.plot([r["time"] - began for r in part], [r["step"] for r in part], color=COLORS[ranks], linewidth=2)
    for what, when in done.items():
        progress.axvline(when - began, color="#8d99a6", linestyle=":")
        progress.text(when - began + 0.6, STEPS * 0.9, what, color="#5a6570")
    loss.set(xlabel="step", ylabel="loss", title="An elastic run: 3 hosts, one killed, booted again")
    loss.set_yscale("log", subs=[])
    loss.set_yticks([0.02, 0.05, 0.1, 0.2, 0.4], labels=["0.02", "0.05", "0.1", "0.2", "0.4"])
    loss.legend(frameon=False)
    progress.set(xlabel="seconds since the first step", ylabel="step")
    for axes in (loss, progress):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/guide/elastic.png"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, hosts(3, slots=1) as cluster:
        folder = Path(name)
        alone = run_alone(folder)
        elastic, done = run_on_hosts(cluster, folder)
    worst = max(abs(r["loss"] / alone[r["step"] - 1]["loss"] - 1) for r in elastic)
    same = all(r["samples"] == alone[r["step"] - 1]["samples"] for r in elastic)
    print(f"{len(elastic)} steps, of which {len(elastic) - STEPS} made again; samples of each step as alone: {same}")
    print(f"largest relative difference of a loss: {worst:.1e}")
    draw(alone, elastic, done, args.out)


if __name__ == "__main__":
    main()
