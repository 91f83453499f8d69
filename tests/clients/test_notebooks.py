"""One process without a launcher, as in a notebook: cells run one by one in one interpreter, again, and interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "first_steps.ipynb"
PLACED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# An interactive interpreter, which is what a notebook's kernel is underneath: an error or an interrupt in a cell is shown,
# and the next cell runs in the same names.
_KERNEL = """
import code, json, sys
kernel = code.InteractiveInterpreter({"__name__": "__main__"})
for number, cell in enumerate(json.load(sys.stdin)):
    try:
        kernel.runcode(compile(cell, f"cell {number}", "exec"))
    except KeyboardInterrupt:
        print("interrupted")
"""


def _run_cells(cells: list[str], folder: Path, **environ: str) -> tuple[str, str]:
    """What the cells print, and their errors."""
    clean = {name: value for name, value in os.environ.items() if name not in PLACED}
    done = subprocess.run(
        [sys.executable, "-c", _KERNEL],
        input=json.dumps(cells),
        env={**clean, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "[INFO]" not in line)


def test_the_example_runs_and_each_cell_runs_again(tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    out, errors = _run_cells([*cells, *cells, *(cell for cell in cells for _ in range(2))], tmp_path)
    assert "Error" not in errors
    first, last = (float(part) for part in next(line for line in out.splitlines() if "->" in line).split("->"))
    assert last < first / 2
    assert out.count("{'steps': ") == 4


_TRAINING = """
import torch, deepspeed
from torch import nn

class Stopping(torch.autograd.Function):
    where = ""

    @staticmethod
    def forward(ctx, x):
        if Stopping.where == "forward":
            raise KeyboardInterrupt
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Stopping.where == "backward":
            raise KeyboardInterrupt
        return grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.tanh(Stopping.apply(self.first(x))))

def train(x):
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    print("loss", loss.item())

torch.manual_seed(0)
config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
config["zero_optimization"] = {"stage": STAGE, "stage3_param_persistence_threshold": 0}
engine, *_ = deepspeed.initialize(model=Net(), config=config)
batches = torch.randn(4, 4, 4)
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_an_interrupt(stage: int, tmp_path: Path) -> None:
    """In forward it leaves nothing behind; in backward a part of the gradients, which `engine.zero_grad()` drops.

    Losses are then those of a run without it.
    """
    begin, steps = f"STAGE = {stage}\n" + _TRAINING, [f"train(batches[{step}])" for step in range(4)]
    interrupted = [f"Stopping.where = {where!r}\ntrain(batches[2])" for where in ("forward", "backward")]
    plain, _ = _run_cells([begin, *steps], tmp_path)
    found, errors = _run_cells(
        [begin, *steps[:2], *interrupted, "Stopping.where = ''\nengine.zero_grad()", *steps[2:]], tmp_path
    )
    losses = [line for line in found.splitlines() if line.startswith("loss")]
    assert found.count("interrupted") + errors.count("KeyboardInterrupt") >= 2
    assert (found + errors).count("call engine.zero_grad()") == 1
    assert losses == [line for line in plain.splitlines() if line.startswith("loss")]
    assert len(losses) == 4
