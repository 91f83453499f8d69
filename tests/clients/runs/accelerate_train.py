"""A training script of a user of Accelerate: everything about DeepSpeed comes from `accelerate launch`.

usage: accelerate launch ... accelerate_train.py OUT [--fail-on RANK] [--dummy]
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, RATE, CLIP, HALF = 16, 0.01, 0.5, 2


def network() -> torch.nn.Module:
    """Return the same network everywhere."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def rows() -> TensorDataset:
    """Four global batches."""
    inputs = torch.randn(4 * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def main() -> None:
    """Train a small network; each rank writes its losses into OUT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--fail-on", type=int, default=-1)
    parser.add_argument("--dummy", action="store_true", help="the optimizer is in the config file")
    parser.add_argument("--local_rank", type=int, help="the launcher nossh says it here too")
    words = parser.parse_args()

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    if accelerator.process_index == words.fail_on:
        sys.exit(7)
    model = network()
    loader = DataLoader(rows(), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    if words.dummy:
        optimizer = DummyOptim(model.parameters(), lr=RATE)
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=lambda own: StepLR(own, HALF))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        scheduler = StepLR(optimizer, HALF * accelerator.num_processes)  # Accelerate steps it once per rank
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses = []
    for features, targets in loader:
        loss = torch.nn.functional.mse_loss(model(features), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())

    plugin = accelerator.state.deepspeed_plugin
    told = {
        "losses": losses,
        "kind": accelerator.distributed_type.value,
        "ranks": accelerator.num_processes,
        "stage": plugin.deepspeed_config["zero_optimization"]["stage"],
        "host": socket.gethostname(),
    }
    (words.out / f"rank{accelerator.process_index}").write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
