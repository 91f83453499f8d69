"""Jobs of `accelerate launch` over the script of `tests/clients/runs/accelerate_train.py`, and what its ranks tell."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.clients.runs.accelerate_train import CLIP, GLOBAL_BATCH, HALF, RATE, network, rows
from tests.support.launching import ROOT, Job

__all__ = ["ACCELERATE", "SCRIPT", "accelerate", "launched", "losses_of_one_process", "told_by"]

SCRIPT = str(ROOT / "tests" / "clients" / "runs" / "accelerate_train.py")
_PROGRAMS = Path(sys.executable).parent
ACCELERATE = (str(_PROGRAMS / "accelerate"), "launch")


def accelerate(folder: Path) -> dict[str, str]:
    """The environment of a user who has activated the environment in which all is installed."""
    return {"PATH": f"{_PROGRAMS}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(folder / "home")}


def launched(
    folder: Path,
    options: Sequence[str],
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    command: Sequence[str] = ACCELERATE,
    seconds: float = 120,
) -> tuple[int, str]:
    """Run `accelerate launch OPTIONS script folder/out WORDS` to its end: (exit status, output)."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    own = {**accelerate(folder), **(environment or {})}
    with Job(folder, [*options, SCRIPT, str(out), *words], own, command=command) as job:
        return job.wait(seconds), job.output


def told_by(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote."""
    files = [folder / "out" / f"rank{rank}" for rank in range(ranks)]
    return [json.loads(each.read_text()) for each in files]


def losses_of_one_process() -> list[float]:
    """What the script comes to without ranks and without Accelerate: any number of ranks has the same global batches."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for update, (features, targets) in enumerate(DataLoader(rows(), batch_size=GLOBAL_BATCH), start=1):
        loss = torch.nn.functional.mse_loss(model(features), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if update == HALF:
            optimizer.param_groups[0]["lr"] = RATE / 10
        losses.append(loss.item())
    return losses
