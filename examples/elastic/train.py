"""A training script that never says "resume": started again, on any number of ranks, it goes on where it stood.

    deepspeed --elastic_training -H hostfile train.py --run runs/a        three hosts; end one, start it again
    deepspeed --num_gpus 2 train.py --run runs/a                          or by hand, on whatever there is

Each step's loss, ranks and samples go to `<run>/steps.jsonl`; `benchmarks/elastic_hosts.py` draws them. The data are made
here, so that the example needs nothing, and the model computes in fp64, so that losses of any number of ranks compare.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import deepspeed
from deepspeed import comm
from deepspeed.utils import RepeatingLoader

LENGTH = 960  # forty steps: no step then begins in one epoch and ends in the next


class Waves(Dataset[Any]):
    """A function of two numbers to learn, with noise; each sample knows its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.rand(LENGTH, 2, generator=generator, dtype=torch.float64) * 4 - 2
        noise = 0.05 * torch.randn(LENGTH, generator=generator, dtype=torch.float64)
        self.targets = torch.sin(2 * self.inputs[:, 0]) * torch.cos(self.inputs[:, 1]) + noise

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[number], self.targets[number], number


def config(folder: Path) -> dict[str, Any]:
    """One global batch for 1, 2, 3, 4, 6, 8, 12 or 24 ranks; checkpoints in `folder`."""
    return {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 24,
            "micro_batch_sizes": [1, 2, 4],
            "version": 0.1,
            "auto_resume": str(folder),
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.02}},
        "zero_optimization": {"stage": 1},
        "checkpoint": {"keep_last": 3},
    }


def train_step(engine: Any, batches: Iterator[Any]) -> dict[str, Any]:
    """One optimizer step; what all ranks saw in it."""
    losses, numbers = [], []
    for _ in range(engine.gradient_accumulation_steps()):
        inputs, targets, read = next(batches)
        loss = nn.functional.mse_loss(engine(inputs).squeeze(-1), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        numbers += read.tolist()
    of_ranks: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(of_ranks, (sum(losses) / len(losses), numbers))
    loss = sum(own for own, _ in of_ranks) / len(of_ranks)
    samples = sorted(number for _, own in of_ranks for number in own)
    return {"step": engine.global_steps, "loss": loss, "ranks": len(of_ranks), "samples": samples, "time": time.time()}


def main() -> None:
    """Train, and save every few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of checkpoints and of steps.jsonl, seen by all hosts"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seconds-per-step", type=float, default=0.0, help="sleep so long, to have time to break something")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config(args.run / "checkpoints"), training_data=Waves())
    batches = iter(RepeatingLoader(loader))
    while engine.global_steps < args.steps:
        record = train_step(engine, batches)
        if comm.get_rank() == 0:
            with (args.run / "steps.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        if engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(args.run / "checkpoints")
        time.sleep(args.seconds_per_step)


if __name__ == "__main__":
    main()
