"""Run logs made up for the tests of their readers: a small run, and a large one with everything in it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BEGIN = 1_780_000_000.0
CONFIG = {
    "train_batch_size": 64,
    "zero_optimization": {"stage": 2},
    "fp16": {"enabled": True},
    "run_log": {"enabled": True, "every": 1},
}
PLAN = {"weights": 1.1e9, "gradients": 0.9e9, "masters and moments": 2.2e9, "activations": 1.4e9}


def write(folder: Path, records: Mapping[int, Iterable[Mapping[str, Any]]]) -> Path:
    """Append each rank's records to its file."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, mine in records.items():
        with (folder / f"rank-{rank:05d}.jsonl").open("a") as file:
            file.writelines(json.dumps(record, allow_nan=False) + "\n" for record in mine)
    return folder


def start(rank: int, time: float = BEGIN, **more: Any) -> dict[str, Any]:
    values = {
        "kind": "start", "time": time, "format": 1, "version": "1.0.0", "rank": rank, "world_size": 2,
        "host": f"node{rank // 2}", "pid": 1000 + rank, "device": "cpu", "mesh": {"data": 2}, "model": "GPT",
        "parameters": 124_000_000, "config": CONFIG, "peak_flops": None, "restarts": 0, "plan": PLAN, "step": 0,
    }  # fmt: skip
    return {**values, **more}


def step(at: int, time: float, loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "time": time, "step": at, "samples": 64 * at, "loss": loss, "lr": [1e-3], "seconds": 0.5, **more}


def rank_step(at: int, time: float, **more: Any) -> dict[str, Any]:
    return {"kind": "rank_step", "time": time, "step": at, "host_bytes": 1_000_000_000, **more}


def end(at: int, time: float, cause: str = "done") -> dict[str, Any]:
    return {"kind": "end", "time": time, "step": at, "cause": cause}


def whole(folder: Path, steps: int = 600, ranks: int = 4, *, name: str = "GPT") -> Path:
    """A run with every kind of record: fp16, experts, a pipeline, a slow rank, and a crash in the middle."""
    half, back = steps // 2, max(1, steps // 20)
    lasted = half * 0.25
    crash = "Traceback (most recent call last):\n  ...\nCommError: rank 3 is gone: no answer for 10 s"
    _attempt(folder, range(1, half + 1), ranks, BEGIN, 0, name, crash)
    resumed = half - back
    _attempt(folder, range(resumed + 1, steps + 1), ranks, BEGIN + lasted + 40, 1, name, "done")
    return folder


def _attempt(folder: Path, steps: range, ranks: int, begin: float, restarts: int, name: str, cause: str) -> None:
    for rank in range(ranks):
        write(folder, {rank: _records(rank, steps, ranks, begin, restarts, name, cause)})


def _records(
    rank: int, steps: range, ranks: int, begin: float, restarts: int, name: str, cause: str
) -> Iterable[dict[str, Any]]:
    chance = random.Random(rank + 100 * restarts)
    yield start(rank, begin, world_size=ranks, restarts=restarts, model=name, mesh={"pipe": 2, "data": ranks // 2},
                peak_flops=9.89e14, device="NVIDIA H200")  # fmt: skip
    if rank == 0 and restarts:
        yield {"kind": "checkpoint", "time": begin + 2, "action": "load", "tag": f"global_step{steps[0] - 1}",
               "step": steps[0] - 1, "seconds": 1.4, "nbytes": 1.5e9, "is_async": False}  # fmt: skip
    if rank == 0:
        yield _schedule(begin + 3)
    time = begin + 5
    for at in steps:
        seconds = 0.25 + 0.02 * chance.random() + (0.05 if at % 97 == 0 else 0)
        time += seconds
        if rank == 0:
            yield _step(at, time, seconds, chance)
            if at % 10 == 0:
                yield {"kind": "experts", "time": time, "step": at, "layers": _shares(at, chance)}
        yield _rank_step(rank, at, time, seconds, chance)
        if rank == 0 and at % (len(steps) // 6 or 1) == 0:
            yield {"kind": "checkpoint", "time": time, "action": "save", "tag": f"global_step{at}", "step": at,
                   "seconds": 0.6 + chance.random(), "nbytes": 1.5e9, "is_async": True}  # fmt: skip
    if rank == 0:
        yield {"kind": "profile", "time": time, "step": steps[0] + 1, "tree": _TREE}
    yield end(steps[-1], time, cause)


def _step(at: int, time: float, seconds: float, chance: random.Random) -> dict[str, Any]:
    loss = 2.1 + 8.5 * math.exp(-at / 90) + 0.25 * math.exp(-at / 900) * chance.gauss(0, 1)
    warm = min(1.0, at / 60)
    return step(
        at, time, loss, lr=[6e-4 * warm * (0.55 + 0.45 * math.cos(at / 400)), 3e-4 * warm], seconds=seconds,
        grad_norm=3.0 * math.exp(-at / 200) + 0.4 + 0.15 * chance.random(), loss_scale=65536.0 / 2 ** (at // 150 % 3),
        skipped=at // 150, samples_per_second=64 / seconds, flops_per_second=4.1e14 / (4 * seconds),
        mfu=0.41 / (4 * seconds), more={"eval_loss": loss + 0.2} if at % 25 == 0 else {},
    )  # fmt: skip


def _rank_step(rank: int, at: int, time: float, seconds: float, chance: random.Random) -> dict[str, Any]:
    waited = seconds * ((0.02 if rank == 2 else 0.16) + 0.05 * chance.random())
    phases = {
        "forward": 0.3 * seconds, "backward": 0.42 * seconds, "backward_allreduce": 0.13 * seconds, "step": 0.12 * seconds,
    }  # fmt: skip
    comm = {
        "reduce_scatter": {"count": 12, "nbytes": 2.4e8, "seconds": 0.05 * seconds + waited / 2},
        "all_gather": {"count": 12, "nbytes": 2.4e8, "seconds": 0.04 * seconds},
        "send": {"count": 16, "nbytes": 3.2e7, "seconds": 0.01 * seconds + waited / 2},
        "all_reduce": {"count": 1, "nbytes": 8, "seconds": 0.0005},
    }
    held = 4.1e9 + 0.25e9 * rank + 0.3e9 * min(1.0, at / 30) + 2e7 * chance.random()
    return rank_step(
        at, time, host_bytes=2.2e9, device_bytes=held, device_peak_bytes=held + 0.6e9, phases=phases, comm=comm,
        waited_seconds=waited,
    )  # fmt: skip


def _shares(at: int, chance: random.Random) -> dict[str, list[float]]:
    layers = {}
    for layer in range(6):
        loads = [math.exp(1.4 * math.exp(-at / 300) * chance.gauss(0, 1)) for _ in range(16)]
        layers[f"layers.{layer}.mlp"] = [load / sum(loads) for load in loads]
    return layers


def _schedule(time: float, stages: int = 2, batches: int = 8) -> dict[str, Any]:
    """1F1B with a backward of twice the forward's time."""
    works: list[list[Any]] = []
    for stage in range(stages):
        at = 0.01 * stage
        order = ["F"] * (stages - stage) + ["B", "F"] * (batches - (stages - stage)) + ["B"] * (stages - stage)
        number = {"F": 0, "B": 0}
        for kind in order:
            length = 0.01 if kind == "F" else 0.02
            works.append([stage, round(at, 4), round(at + length, 4), kind, number[kind]])
            number[kind] += 1
            at += length
    return {"kind": "schedule", "time": time, "name": "1f1b", "stages": stages, "micro_batches": batches,
            "text": "stage 0:  F0 F1 B0 F2 B1\nstage 1:  F0 B0 F1 B1", "works": works, "bubble": 0.111}  # fmt: skip


_TREE = [
    {"name": "GPT", "depth": 0, "parameters": 124e6, "macs": 1e12, "flops": 2e12, "seconds": 0.2, "share": 1.0},
    {"name": "layers.0", "depth": 1, "parameters": 7e6, "macs": 8e10, "flops": 1.6e11, "seconds": 0.02, "share": 0.1},
]
