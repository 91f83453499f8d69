"""A model larger than the memory that the process may have trains with its state on NVMe, and not without.

The limit is the system's (`RLIMIT_DATA`): what a process has mapped for itself, beyond what it has before the model is
built. Libraries, the interpreter and a first small engine are in place then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = """
import json, resource, sys
import torch
from torch import nn
import deepspeed

WIDTH, LAYERS = 512, 64


class Layers(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs)) / len(self.layers)
        return inputs.float().square().mean()


def train(settings, width, layers, steps):
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = Layers(width, layers)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    losses = []
    for _ in range(steps):
        loss = engine(torch.ones(4, width, dtype=torch.bfloat16))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    numel = sum(p.ds_numel for p in model.parameters())
    engine.destroy() if width != WIDTH else None  # whole, the large one does not fit
    return losses, numel


def mapped_nbytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024


settings, limit_nbytes = json.loads(sys.argv[1]), int(sys.argv[2])
train(settings, 32, 2, 2)
if limit_nbytes:
    limit = mapped_nbytes() + limit_nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    losses, numel = train(settings, WIDTH, LAYERS, 3)
except (RuntimeError, MemoryError) as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"losses": losses, "numel": numel}))
"""

NUMEL = 64 * 512 * 513
BYTES_OF_STATE = 16
"""Of each parameter, trained in bf16 by Adam: weight, gradient, master, two moments."""


def _run(tmp_path: Path, limit_nbytes: int, **offload: Any) -> dict[str, Any]:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 2_000_000,
            "stage3_prefetch_bucket_size": 1_000_000,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": 300_000,
            "sub_group_size": 1_000_000,
            **offload,
        },
    }
    # Large blocks of memory go back to the system when they are freed, so that what is mapped is what is used.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(script), json.dumps(settings), str(limit_nbytes)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _nvme(folder: Path) -> dict[str, Any]:
    return {
        "offload_param": {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, "buffer_size": 300_000},
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": str(folder),
            "pipeline_read": True,
            "pipeline_write": True,
        },
    }


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux alone")
def test_a_model_larger_than_the_memory_trains_with_nvme_and_not_without(tmp_path: Path) -> None:
    limit_nbytes = NUMEL * BYTES_OF_STATE * 3 // 10
    without = _run(tmp_path, limit_nbytes)
    assert "allocate" in without["error"]
    disk = tmp_path / "disk"
    with_nvme = _run(tmp_path, limit_nbytes, **_nvme(disk))
    assert with_nvme.get("numel") == NUMEL, with_nvme
    assert with_nvme["losses"] == _run(tmp_path, 0)["losses"]  # all the memory it wants: the same numbers
    assert list(disk.iterdir()) == []
