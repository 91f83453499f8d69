"""The commands `zero_to_fp32` and `zero_to_torch`, as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.unit.checkpoint.export_checkpoints import save_net


def run(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", f"deepspeed.utils.{command}", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_command_says_what_it_found_and_writes_the_weights(tmp_path: Path) -> None:
    expected = save_net(tmp_path / "in", zero_stage=2, dp_world_size=4)
    done = run("zero_to_fp32", tmp_path / "in", tmp_path / "out", "--max_shard_size", "150B")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"Processing zero checkpoint '{tmp_path / 'in' / 't'}'"
    assert re.fullmatch(r"Parsing checkpoint created by deepspeed==\S+", lines[1])
    assert lines[2] == "Detected checkpoint of type zero stage 2, world_size: 4"
    assert lines[3] == "Reconstructed Frozen fp32 state dict with 1 params 12 elements"
    trained = {name: value for name, value in expected.items() if re.match(r"emb|fc|none|norm\.(weight|bias)", name)}
    numel = sum(value.numel() for value in trained.values())
    assert lines[4] == f"Reconstructed fp32 state dict with {len(trained)} params {numel} elements"
    saved = [Path(line.removeprefix("Saved ")) for line in lines[5:]]
    assert sorted(saved) == sorted((tmp_path / "out").iterdir())
    assert saved[-1].name == "pytorch_model.bin.index.json"
    got = {name: value for file in saved[:-1] for name, value in torch.load(file, weights_only=True).items()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_options_choose_tag_type_container_and_parts(tmp_path: Path) -> None:
    save_net(tmp_path / "in", "a")
    save_net(tmp_path / "in", "b", extra={"more": torch.ones(1)})
    options = ["-t", "a", "--dtype", "bf16", "--safe_serialization", "--exclude_frozen_parameters", "-d"]
    done = run("zero_to_torch", tmp_path / "in", tmp_path / "out", *options)
    assert (done.returncode, done.stderr) == (0, "")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got["emb.weight"].dtype == torch.bfloat16
    assert torch.equal(got["head.weight"], got["emb.weight"])
    assert not {"more", "frozen.weight"} & got.keys()


def test_an_error_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    save_net(tmp_path / "in")
    (tmp_path / "in" / "latest").unlink()
    done = run("zero_to_fp32", tmp_path / "in", tmp_path / "out")
    assert done.returncode == 1
    assert re.fullmatch(r"zero_to_fp32: .*no file 'latest', so a tag is needed. Tags there: 't'.*\n", done.stderr)
    assert not (tmp_path / "out").exists()
    assert run("zero_to_torch", tmp_path / "in", tmp_path / "out").returncode == 2  # --dtype is required
