"""Our checkpoints as the original's stage files: the original itself resumes from them and goes on as we do.

Needs a Python that has the original 0.19.8 beside torch: DEEPSPEED_ORIGINAL_PYTHON=/path/to/bin/python. It is run as a
program; nothing of it is imported here.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from torch import Tensor

from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.names import master_tensor, module_tensor
from deepspeed.checkpoint.original.stages import StageSource
from deepspeed.checkpoint.original.to_stages import Precision, ZeroStage, write_stages

ORIGINAL = os.environ.get("DEEPSPEED_ORIGINAL_PYTHON", "")

pytestmark = pytest.mark.skipif(
    not Path(ORIGINAL).is_file(), reason="DEEPSPEED_ORIGINAL_PYTHON names no Python that has the original 0.19.8"
)

# Runs under either library. argv: a JSON list of cases {config, load, save, steps}; each is one engine.
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

STEPS_BEFORE, STEPS_AFTER = 3, 2


# fp32: sums over ranks in another order, a few units in the last place of weights and losses below 4. bf16: the original
# sums gradients in bf16 and we in fp32, so they differ by 2**-8 of themselves; Adam turns that into at most as much of a
# step, and the two steps move no weight by more than 0.04 and no loss by more than 1.
WORST_AFTER = {"fp32": 4e-6, "bf16": 2.0**-8}


class Target(NamedTuple):
    """What the original resumes as."""

    stage: ZeroStage
    dtype: Precision
    world_size: int


TARGETS = [Target(stage, dtype, ranks) for ranks in (2, 3) for dtype in ("fp32", "bf16") for stage in get_args(ZeroStage)]


def _config(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.01, 0.02], "warmup_min_lr": [0.001, 0.002],
                                                     "warmup_num_steps": 4, "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage, "sub_group_size": 40},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }  # fmt: skip


def _run(python: str, folder: Path, world_size: int, cases: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
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


def _tensors(folder: Path, members: list[list[str]]) -> dict[str, Tensor]:
    """Every weight and buffer, in the highest precision stored, and the optimizer's tensors."""
    source = open_checkpoint(folder)
    if isinstance(source, StageSource):
        source = source.with_members(members)  # stage 0 has numbers in place of names
    prefixes = (module_tensor(""), master_tensor(""), "optimizer/")
    names = {name.removeprefix(prefix): name for prefix in prefixes for name in source.names(prefix)}
    return {name: source.read(tensor).float() for name, tensor in names.items()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`fp32` and `bf16`: checkpoints of ours, trained at ZeRO stage 2 on two ranks."""
    folder = tmp_path_factory.mktemp("ours")
    cases = [
        {"config": _config(2, dtype), "load": None, "save": str(folder / dtype), "steps": STEPS_BEFORE}
        for dtype in get_args(Precision)[:2]
    ]
    _run(sys.executable, folder / "training", 2, cases)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_original_goes_on_from_the_export_as_we_do_from_the_checkpoint(
    ours: Path, tmp_path: Path, world_size: int
) -> None:
    targets = [target for target in TARGETS if target.world_size == world_size]
    cases: dict[str, list[dict[str, Any]]] = {"ours": [], "original": []}
    for number, (stage, dtype, _) in enumerate(targets):
        exported = tmp_path / "exported" / str(number)
        write_stages(open_checkpoint(ours / dtype), exported, stage=stage, world_size=world_size, dtype=dtype)
        for who, load in (("ours", ours / dtype), ("original", exported)):
            save = str(tmp_path / who / str(number))
            cases[who].append({"config": _config(stage, dtype), "load": str(load), "save": save, "steps": STEPS_AFTER})
    reports = {
        who: _run(python, tmp_path / f"run-{who}", world_size, cases[who])
        for who, python in (("ours", sys.executable), ("original", ORIGINAL))
    }
    optimizer = open_checkpoint(ours / "fp32").state["optimizer"]
    assert optimizer is not None
    for number, target in enumerate(targets):
        _assert_same_training(target, *([rank[number] for rank in reports[who]] for who in cases))
        for moment in ("-loaded", ""):
            mine, its = (_tensors(tmp_path / who / f"{number}{moment}", optimizer["members"]) for who in cases)
            assert set(mine) == set(its), target
            worst = max(float((mine[name] - its[name]).abs().max()) for name in mine)
            assert worst <= (WORST_AFTER[target.dtype] if moment == "" else 0.0), (target, moment, worst)


def _assert_same_training(target: Target, ours: list[dict[str, Any]], original: list[dict[str, Any]]) -> None:
    for mine, its in zip(ours, original, strict=True):
        worst = max(abs(a - b) for a, b in zip(mine["losses"], its["losses"], strict=True))
        assert worst <= WORST_AFTER[target.dtype], (target, mine, its)
        assert mine["losses"][:2] == its["losses"][:2], f"{target}: the forward of equal weights is equal"
        assert mine["rates"] == pytest.approx(its["rates"], abs=1e-15)
        for key in ("epoch", "steps", "samples"):
            assert mine[key] == its[key], (target, key, mine, its)
