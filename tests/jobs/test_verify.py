"""`deepspeed verify` on whole scripts: what agrees, what differs and why it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed.checkpoint.disk.container import read_header
from tests.support.launching import run_job

# `--fault` says what is wrong with the script; "lr" makes what depends on the ZeRO stage wrong.
SCRIPT = """
import argparse, json, os, pathlib, sys, torch, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--fault", default="")
parser.add_argument("--steps", type=int, default=100)
args = parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-6}},
    "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
}
torch.manual_seed(0)
if args.fault == "weights":
    torch.seed()
with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
engine = deepspeed.initialize(model=model, config=config)[0]
if args.fault == "raise" and engine.zero_optimization_stage():
    sys.exit(7)
if args.fault == "lr" and engine.zero_optimization_stage():
    engine.optimizer.param_groups[0]["lr"] *= 1.5
generator = torch.Generator().manual_seed(1 + engine.global_rank)
if args.fault == "data":
    generator.seed()
for _ in range(args.steps):
    loss = engine(torch.randn(4, 8, generator=generator)).square().mean()
    engine.backward(loss)
    engine.step()
pathlib.Path("reached").touch()
"""


def _verify(folder: Path, *words: str, ranks: int = 1) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    return run_job(folder, ["verify", "--num_gpus", str(ranks), *words])


def test_sharded_weights_built_in_an_init_context_agree_with_stage_0(tmp_path: Path) -> None:
    status, output = _verify(tmp_path, "--steps", "2", "--keep", "kept", "train.py", "--stage", "3", ranks=2)
    assert status == 0, output
    assert "engine 0: ZeRO stage 0 against stage 3, 2 rank(s), 2 step(s)" in output
    assert "4 of 4 parameters are equal in every bit" in output
    assert "AGREES within 0.001" in output
    assert not (tmp_path / "reached").exists(), "the script ends after the steps"
    for run, stage in (("stage0", "0"), ("configured", "3")):
        files = sorted(path.name for path in (tmp_path / "kept" / run).iterdir())
        assert files == [f"engine0-step{step}.safetensors" for step in range(3)]
        header = read_header(tmp_path / "kept" / run / files[-1])
        assert header.metadata["stage"] == stage
        assert set(header.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_wrong_update_shows_however_small_the_learning_rate_is(tmp_path: Path) -> None:
    status, output = _verify(tmp_path, "--steps", "1", "train.py", "--fault", "lr")
    assert status == 1, output
    line = next(line for line in output.splitlines() if line.strip().startswith("0.weight"))
    name, step, absolute, of_value, of_change = line.removesuffix("<-- too much").split()
    assert (name, step) == ("0.weight", "1")
    assert float(of_value) < 1e-5 < float(absolute) * 1e3
    assert 0.3 < float(of_change) < 0.7, "half as much again"
    assert "DIFFERS: gradients or updates are not the same" in output


@pytest.mark.parametrize(
    ("fault", "said"),
    [("data", "the losses of step 1 already do, from equal weights"), ("weights", "DIFFERS before the first step")],
)
def test_what_the_script_does_not_seed_is_named(fault: str, said: str, tmp_path: Path) -> None:
    status, output = _verify(tmp_path, "--steps", "1", "train.py", "--fault", fault)
    assert status == 1, output
    assert said in output


def test_a_script_that_fails_passes_its_status_on(tmp_path: Path) -> None:
    status, output = _verify(tmp_path, "train.py", "--fault", "raise", "--steps", "0")
    assert status == 7, output
    assert "The script failed as configured, with exit status 7" in output


def test_a_script_without_an_engine_is_settled_so(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("print('done')")
    status, output = _verify(tmp_path, "nothing.py")
    assert status == 1
    assert "no engine was recorded. The script must call deepspeed.initialize()" in output


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    status, output = _verify(tmp_path, "--keep", ".", "train.py")
    assert status == 1
    assert "--keep .: it exists and is not an empty folder" in output


def test_a_script_named_verify_is_run_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "verify").write_text("import json, sys; open('told', 'w').write(json.dumps(sys.argv[1:]))")
    status, output = run_job(tmp_path, ["./verify", "--no_local_rank"])
    assert status == 0, output
    assert json.loads((tmp_path / "told").read_text())[-1] == "--no_local_rank"
    status, output = run_job(tmp_path, ["verify"])
    assert status == 2
    assert "usage: deepspeed verify" in output
