"""Starting an engine loads nothing that it does not need: seconds are lost there, on every rank, at every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys
import torch
import deepspeed

model = torch.nn.Linear(4, 4)
settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engine = deepspeed.initialize(model=model, config=settings)[0]
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
if len(sys.argv) > 1:
    engine.save_checkpoint(sys.argv[1])
    engine.load_checkpoint(sys.argv[1])
print(sorted({"torch._dynamo", "torch._inductor", "tensorboard", "wandb", "hjson"} & set(sys.modules)), engine.global_steps)
"""


def test_a_first_step_loads_neither_compiler_nor_unused_packages() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[] 1"


def test_saving_and_loading_load_no_compiler_either(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[] 1"
