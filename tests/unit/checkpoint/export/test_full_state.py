from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tests.unit.checkpoint.export_checkpoints import FROZEN, TIED, Net, save_net


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def test_the_state_dict_is_complete_and_in_fp32(tmp_path: Path) -> None:
    expected = save_net(tmp_path)
    got = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name
    assert got["head.weight"] is got["emb.weight"]


def test_a_tag_goes_before_latest_and_frozen_parameters_are_left_out_on_request(tmp_path: Path) -> None:
    first = save_net(tmp_path, "first")
    save_net(tmp_path, "second", extra={"more": torch.ones(1)})
    assert "more" in get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    got = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "first", exclude_frozen_parameters=True)
    assert got.keys() == {name for name in first if TIED.get(name, name) not in FROZEN}


def test_lazy_tensors_know_their_shape_and_are_read_when_asked(tmp_path: Path) -> None:
    expected = save_net(tmp_path)
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert lazy["head.weight"] is lazy["emb.weight"]
    for name, value in expected.items():
        assert (lazy[name].shape, lazy[name].dtype, lazy[name].numel()) == (value.shape, value.dtype, value.numel())
        assert torch.equal(lazy[name].contiguous(), value), name
    (tmp_path / "t" / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"rank_00000\.safetensors cannot be read"):
        lazy["emb.weight"].contiguous()


def test_a_plain_module_takes_the_weights(tmp_path: Path) -> None:
    expected = save_net(tmp_path)
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(7)
    assert load_state_dict_from_zero_checkpoint(net, tmp_path) is net
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())


def test_a_module_that_does_not_fit_is_settled_and_not_half_loaded(tmp_path: Path) -> None:
    save_net(tmp_path)
    net = Net()
    net.extra = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"lacks \['extra.bias', 'extra.weight'\] and has nothing"):
        load_state_dict_from_zero_checkpoint(net, tmp_path)
    wide = Net()
    wide.fc = torch.nn.Linear(4, 6)
    with pytest.raises(CheckpointError, match=r"size mismatch for fc.weight"):
        load_state_dict_from_zero_checkpoint(wide, tmp_path)


def test_frozen_parameters_that_were_not_saved_keep_their_values(tmp_path: Path) -> None:
    expected = save_net(tmp_path, has_frozen_parameters=False)
    net = Net()
    torch.nn.init.constant_(net.frozen.weight, 3.0)
    load_state_dict_from_zero_checkpoint(net, tmp_path)
    assert torch.equal(net.frozen.weight, torch.full((3, 4), 3.0))
    assert torch.equal(net.fc.weight, expected["fc.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bf16", None])
def test_files_are_written_in_the_type_that_was_asked_for(tmp_path: Path, dtype: Any) -> None:
    expected = save_net(tmp_path / "in")
    convert_zero_checkpoint_to_state_dict(tmp_path / "in", tmp_path / "out", dtype=dtype)
    got = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert got.keys() == expected.keys()
    assert got["emb.weight"].dtype == (torch.float32 if dtype is None else torch.bfloat16)
    assert torch.equal(got["emb.weight"], expected["emb.weight"].to(got["emb.weight"].dtype))
    with pytest.raises(ValueError, match="dtype='int8' is no type"):
        convert_zero_checkpoint_to_state_dict(tmp_path / "in", tmp_path / "out", dtype="int8")


def test_positional_arguments_are_those_of_the_original(tmp_path: Path) -> None:
    save_net(tmp_path / "in", "a")
    convert_zero_checkpoint_to_fp32_state_dict(str(tmp_path / "in"), str(tmp_path / "out"), "100B", True, "a", True)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert "frozen" not in (tmp_path / "out" / "model.safetensors.index.json").read_text()


def test_what_is_not_there_is_settled_as_the_builtin_that_callers_catch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no file 'latest'"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 'x'"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "x")
