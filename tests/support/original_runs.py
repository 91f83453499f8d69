"""Train tiny engines under either library: ours, or the original 0.19.8, run as a program; nothing of it is imported.

The original is the Python that DEEPSPEED_ORIGINAL_PYTHON=/path/to/bin/python names; tests that need it skip themselves else.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ORIGINAL = os.environ.get("DEEPSPEED_ORIGINAL_PYTHON", "")

# Runs under either library. argv: a JSON list of cases {config, load, save, steps, and maybe seed}; each is one engine.
SCRIPT = """
import json, sys
import torch, deepspeed
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.emb.weight
        self.fixed = nn.Linear(6, 6)
        self.register_buffer("seen", torch.full((3,), 5.0))
        for number, param in enumerate(self.parameters()):
            if param.dim() > 1:
                param.data = torch.cos(torch.arange(param.numel()) * 0.7 + number).mul(0.3).view(param.shape)
        self.fixed.requires_grad_(False)

    def forward(self, tokens, targets):
        hidden = self.emb(tokens)
        hidden = self.norm(hidden + self.down(torch.tanh(self.up(hidden))) + self.fixed(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())

def batch(number):
    places = torch.arange(8).view(2, 4) + 8 * number
    return places * 5 % 13, places * 7 % 13

deepspeed.init_distributed("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
reports = []
for case in json.loads(open(sys.argv[1]).read()):
    if "seed" in case:  # else what is not in the formula below is arbitrary
        torch.manual_seed(case["seed"])
    net = Net()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    engine = deepspeed.initialize(model=net, model_parameters=groups, config=case["config"])[0]
    client = engine.load_checkpoint(case["load"])[1] if case["load"] else {}
    if case["load"]:
        engine.save_checkpoint(case["save"] + "-loaded")
    losses = []
    for step in range(engine.global_steps, engine.global_steps + case["steps"]):
        for micro in range(2):
            loss = engine(*batch((step * 2 + micro) * world_size + rank))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    engine.save_checkpoint(case["save"], client_state={"epoch": 7, "seen": ["a", 1.5]})
    reports.append({"losses": losses, "rates": engine.get_lr(), "epoch": (client or {}).get("epoch"),
                    "steps": engine.global_steps, "samples": engine.global_samples})
    if hasattr(engine, "destroy"):
        engine.destroy()
open(f"{sys.argv[1]}.{rank}", "w").write(json.dumps(reports))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def two_groups(stage: int, dtype: str, **blocks: Any) -> dict[str, Any]:
    """Config for `run_engines`: two groups with rates of their own, several sub-groups at stage 3."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.01, 0.02], "warmup_min_lr": [0.001, 0.002],
                                                     "warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "sub_group_size": 40},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        **blocks,
    }  # fmt: skip


def run_engines(python: str, folder: Path, world_size: int, cases: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run the cases on new ranks; one list of reports per rank."""
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, outputs = [], [folder / f"output.{rank}" for rank in range(world_size)]
    for rank, output in enumerate(outputs):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment.update({key: str(value) for key, value in place.items()})
        with output.open("wb") as file:
            command = [python, str(folder / "script.py"), str(folder / "cases.json")]
            ranks.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=subprocess.STDOUT))
    try:
        statuses = [process.wait(timeout=540) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert statuses == [0] * world_size, "\n".join(output.read_text(errors="replace")[-3000:] for output in outputs)
    return [json.loads((folder / f"cases.json.{rank}").read_text()) for rank in range(world_size)]
