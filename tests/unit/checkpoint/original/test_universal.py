from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.original.reading.universal import UniversalSource
from deepspeed.errors import ArgumentError, CheckpointDamagedError
from tests.support.original_net import FIXTURES, full_weights

STAGES = ["stage1-fp32", "stage2-bf16", "stage3-bf16"]


def opened(folder: Path) -> UniversalSource:
    return UniversalSource(folder, folder.name, Alone())


@pytest.fixture
def copied(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A universal folder to spoil."""
    folder = tmp_path / "step3_universal"
    shutil.copytree(FIXTURES / f"universal-from-{request.param}" / "step3_universal", folder)
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_every_weight_and_buffer_equals_the_originals(stage: str) -> None:
    found = full_weights(opened(FIXTURES / f"universal-from-{stage}" / "step3_universal"))
    expected = load_file(FIXTURES / f"universal-from-{stage}" / "expected_fp32.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value.float(), rtol=0, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_moments_have_the_parameters_shape_and_the_state_is_the_engines(stage: str) -> None:
    source = opened(FIXTURES / f"universal-from-{stage}" / "step3_universal")
    trained = ["emb.weight", "fc1.weight", "fc1.bias", "fc2.weight", "norm.weight", "norm.bias"]
    keys = ("exp_avg", "exp_avg_sq")
    assert source.names("optimizer/") == sorted(f"optimizer/{name}/{key}" for name in trained for key in keys)
    assert source.shape("optimizer/fc1.weight/exp_avg") == source.shape("master/fc1.weight") == (20, 12)
    assert source.read("optimizer/fc1.weight/exp_avg_sq").min() > 0
    state, optimizer = source.state, source.state["optimizer"]
    assert (state["global_steps"], state["global_samples"], state["micro_steps"]) == (3, 24, 6)
    assert (state["dp_world_size"], state["zero_stage"]) == (2, int(stage[5]))
    assert (state["buffers"], state["frozen_parameters"]) == (["seen"], ["frozen.weight", "frozen.bias"])
    assert state["shared_parameters"] == {"head.weight": "emb.weight"}
    assert state["lr_scheduler"] == {"last_batch_iteration": 2}
    assert optimizer is not None
    assert optimizer["members"] == [trained]
    assert optimizer["scalars"] == {name: {"step": 3.0} for name in sorted(trained)}
    assert "params" not in optimizer["groups"][0]
    assert source.client_state() == {"epoch": 7, "note": "hello"}


def test_a_tied_weight_is_the_owners_master_and_not_the_rounded_copy() -> None:
    folder = FIXTURES / "universal-from-stage2-bf16" / "step3_universal"
    source = opened(folder)
    assert not [name for name in source.names() if "head.weight" in name]
    rounded = torch.load(folder / "zero" / "head.weight" / "fp32.pt")["param"]
    assert not torch.equal(rounded, source.read("master/emb.weight").view(17, 12))


def test_any_range_is_read_and_a_wrong_one_refused() -> None:
    source = opened(FIXTURES / "universal-from-stage3-bf16" / "step3_universal")
    whole = source.read("master/fc1.weight")
    out = torch.zeros(7, dtype=torch.bfloat16)
    assert source.read("master/fc1.weight", 233, out=out) is out
    assert torch.equal(out, whole[233:].bfloat16())
    frozen = source.read("module/frozen.weight")  # two shards of 72
    assert torch.equal(source.read("module/frozen.weight", 70, 5), frozen[70:75])
    with pytest.raises(ArgumentError, match=r"elements 233 to 241 of 'master/fc1.weight'"):
        source.read("master/fc1.weight", 233, 8)
    with pytest.raises(ArgumentError, match=r"no tensor 'master/fc1.wait'. Nearest names: 'master/fc1.weight'"):
        source.read("master/fc1.wait")


@pytest.mark.parametrize("copied", ["stage2-bf16"], indirect=True)
def test_a_lost_parameter_is_named_when_the_folder_is_opened(copied: Path) -> None:
    shutil.rmtree(copied / "zero" / "fc2.weight")
    (copied / "zero" / "norm.bias" / "fp32.pt").unlink()
    with pytest.raises(CheckpointDamagedError, match=r"lacks zero/<name>/fp32.pt of 'fc2.weight', 'norm.bias'"):
        opened(copied)


@pytest.mark.parametrize("copied", ["stage3-bf16"], indirect=True)
def test_a_flat_tensor_that_does_not_fit_its_shape_is_damage(copied: Path) -> None:
    torch.save(torch.zeros(239), copied / "zero" / "fc1.weight" / "fp32.pt")
    with pytest.raises(CheckpointDamagedError, match=r"fc1.weight/fp32.pt holds a tensor of 239 elements.*\(20, 12\)"):
        opened(copied).read("master/fc1.weight")


@pytest.mark.parametrize("copied", ["stage3-bf16"], indirect=True)
def test_a_frozen_parameter_with_a_missing_shard_is_damage(copied: Path) -> None:
    path = copied / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    states = torch.load(path)
    states["frozen_param_fragments"]["frozen.weight"] = states["frozen_param_fragments"]["frozen.weight"][:0]
    torch.save(states, path)
    source = opened(copied)
    assert source.read("master/emb.weight").numel() == 17 * 12
    with pytest.raises(CheckpointDamagedError, match=r"shards of 2 ranks, too few for the frozen parameter 'frozen.weight'"):
        source.read("module/frozen.weight")


@pytest.mark.parametrize("copied", ["stage2-bf16"], indirect=True)
def test_a_vocabulary_without_its_padding_has_the_shape_that_its_file_has(copied: Path) -> None:
    value = torch.rand(15, 12)
    torch.save({"param": value, "cat_dim": 0, "vocab_tensor": True}, copied / "zero" / "emb.weight" / "fp32.pt")
    source = opened(copied)
    assert source.shape("master/emb.weight") == (15, 12)
    assert torch.equal(source.read("master/emb.weight"), value.flatten())


@pytest.mark.parametrize("copied", ["stage2-bf16"], indirect=True)
def test_every_changed_file_is_named_by_the_check(copied: Path) -> None:
    source = opened(copied)
    source.check_own_share()
    spoilt = ["zero/fc1.weight/exp_avg.pt", "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"]
    for name in spoilt:
        _flip_a_bit_of_the_pickle(copied / name)
    with pytest.raises(CheckpointDamagedError) as caught:
        source.check_own_share()
    assert all(name in str(caught.value) for name in spoilt)
    assert "fc2.weight" not in str(caught.value)


def _flip_a_bit_of_the_pickle(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    content = bytearray(path.read_bytes())
    content[content.index(pickled) + len(pickled) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("copied", ["stage1-fp32"], indirect=True)
def test_a_folder_of_weights_alone_has_no_optimizer(copied: Path) -> None:
    (copied / "zero" / "optimizer_state.pt").unlink()
    for path in [*copied.glob("zero/*/exp_avg*.pt"), *copied.glob("zero/*/step.pt")]:
        path.unlink()
    source = opened(copied)
    assert source.state["optimizer"] is None
    assert source.names("optimizer/") == []
    assert len(source.names("master/")) == 6


def test_the_fixtures_are_what_their_readme_says() -> None:
    report = json.loads((FIXTURES / "universal-from-stage1-fp32" / "expected_resume.json").read_text())
    assert [rank["first_step"] for rank in report] == [3, 3]
