"""A process that ends, in whatever way Python lets it end, first brings its background save to the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.checkpoint import open_checkpoint

SCRIPT = """
import atexit, os, sys, threading
import torch
import deepspeed
from deepspeed import comm
from deepspeed.checkpoint.save.engines import CheckpointEngine
from deepspeed.checkpoint.disk.storage import Storage

class AfterTheScript(Storage):
    def create(self, path):
        if path.name.startswith("rank_") and threading.current_thread() is not threading.main_thread():
            threading.main_thread().join()  # the script's code is over
            print("the shard is begun after the end of the script", flush=True)
        return super().create(path)

folder, way = sys.argv[1:]
model = torch.nn.Linear(4, 4)
settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "checkpoint": {"async_save": True},
            "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(model=model, config=settings)
engine.checkpoint_engine = CheckpointEngine(storage=AfterTheScript())
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()

def save():
    engine.save_checkpoint(folder, tag="last", client_state={"way": way})

if way == "in a function of atexit":
    atexit.register(save)
else:
    save()
if way == "with a status":
    sys.exit(3)
if way == "with an exception":
    raise RuntimeError("training went wrong")
if way == "after taking the group down":
    comm.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("way", "status", "world_size"),
    [
        ("with an exception", 1, 2),
        ("after taking the group down", 0, 2),
        ("with a status", 3, 1),
        ("in a function of atexit", 0, 1),
    ],
)
def test_a_script_that_ends_right_after_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, way: str, status: int, world_size: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "saved"
    ranks = [_start(script, folder, way, rank, world_size) for rank in range(world_size)]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [status] * world_size, outputs
    assert ("after the end of the script" in outputs[0]) == (way != "in a function of atexit"), outputs
    assert (folder / "latest").read_text() == "last"
    source = open_checkpoint(folder)
    source.check_own_share()
    assert source.client_state() == {"way": way}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def _start(script: Path, folder: Path, way: str, rank: int, world_size: int) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(folder), way]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
