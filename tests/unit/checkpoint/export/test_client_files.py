"""The files as a client opens them that collects a checkpoint into one file of its own."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files
from tests.unit.checkpoint.export_checkpoints import save_net

ORIGINAL = Path(__file__).parents[3] / "fixtures" / "original"
ENGINES_KEYS = {"module", "optimizer", "lr_scheduler", "csr_tensor_module_names", "skipped_steps", "global_steps"}
ENGINES_KEYS |= {"dp_world_size", "mp_world_size"}

CLIENT_STATE: dict[str, Any] = {
    "epoch": 7,
    "note": "hello",
    "callbacks": {"best": np.float64(0.5), "path": Path("a") / "b", "seen": {1, 2}},
    "args": argparse.Namespace(lr=0.1, sizes=(1, 2)),
    "array": np.arange(3),
    "tensor": torch.arange(4.0),
}


def _collect(folder: Path) -> tuple[int, dict[str, Any]]:
    stage = torch.load(get_optim_files(str(folder))[0], weights_only=True)["optimizer_state_dict"]["zero_stage"]
    state = torch.load(get_model_state_file(str(folder), stage), weights_only=True)
    return stage, {key: value for key, value in state.items() if key not in ENGINES_KEYS}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_stage_and_client_state_come_out_as_plain_values(tmp_path: Path, stage: int) -> None:
    save_net(tmp_path, client_state=CLIENT_STATE, zero_stage=stage)
    before = sorted(tmp_path.rglob("*"))
    found_stage, state = _collect(tmp_path / "t")
    assert found_stage == stage
    assert torch.equal(state.pop("array"), torch.arange(3))
    assert torch.equal(state.pop("tensor"), torch.arange(4.0))
    assert state == {
        "epoch": 7,
        "note": "hello",
        "callbacks": {"best": 0.5, "path": "a/b", "seen": {1, 2}},
        "args": {"lr": 0.1, "sizes": (1, 2)},
    }
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("name", "stage"), [("stage1-fp32", 1), ("stage2-bf16", 2), ("stage3-bf16", 3)])
def test_the_originals_own_files_are_given_where_there_are_some(name: str, stage: int) -> None:
    folder = ORIGINAL / name / "step3"
    files = [Path(file) for file in get_optim_files(folder)]
    assert [file.parent for file in files] == [folder] * 2
    assert "_rank_0_" in files[0].name
    state = torch.load(get_model_state_file(folder, stage), weights_only=True)
    assert (state["epoch"], state["note"]) == (7, "hello")


def test_a_folder_without_them_is_settled(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no optimizer states.*Give the folder of one tag"):
        get_optim_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no model states of ZeRO stage 3"):
        get_model_state_file(tmp_path, 3)


def test_the_summaries_are_gone_when_the_process_has_ended(tmp_path: Path) -> None:
    save_net(tmp_path)
    code = f"from deepspeed.utils.zero_to_fp32 import get_optim_files; print(get_optim_files({str(tmp_path / 't')!r})[0])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip().endswith("optim_states.pt")
    assert not Path(done.stdout.strip()).exists()


def test_the_weights_of_a_copied_checkpoint_need_nothing_else(tmp_path: Path) -> None:
    save_net(tmp_path / "in", client_state={"epoch": 1})
    shutil.copytree(tmp_path / "in" / "t", tmp_path / "elsewhere")
    assert _collect(tmp_path / "elsewhere") == (1, {"epoch": 1})
