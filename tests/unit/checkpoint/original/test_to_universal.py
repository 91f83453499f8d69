from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.opening import open_folder
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.pickles import save_archive
from deepspeed.checkpoint.original.reading.universal import UniversalSource
from deepspeed.checkpoint.original.writing import to_universal
from deepspeed.checkpoint.original.writing.to_universal import (
    MissingUniversalInfoError,
    UnmatchedPatternError,
    write_universal,
)
from deepspeed.checkpoint.source import CheckpointSource
from deepspeed.errors import ArgumentError, CheckpointError
from tests.support.original_net import FIXTURES, full_weights
from tests.unit.checkpoint.original.source_of import (
    SCALED,
    PlainSource,
    contents,
    trained_state,
    trained_tensors,
)

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 5), "empty": (0, 4), "scalar": ()}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def ours(tmp_path: Path, **changes: Any) -> PlainSource:
    """Two groups, frozen weights, buffers, a tie, a moving loss scale; bf16."""
    tensors = trained_tensors(SHAPES)
    tensors["module/frozen"] = torch.arange(7).bfloat16() / 3
    tensors["module/mean"] = torch.tensor([1.5, -2.5])
    tensors["module/count"] = torch.tensor(2**40 + 1)
    state: dict[str, Any] = {
        "shared_parameters": {"head.weight": "b.weight"},
        "frozen_parameters": ["frozen"],
        "buffers": ["mean", "count"],
        "ds_config": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}},
        **changes,
    }
    members = [["a.weight", "b.weight", "empty"], ["a.bias", "scalar"]]
    client = {"epoch": 7, "nested": {"order": torch.arange(3)}}
    return PlainSource(tmp_path / "ours" / "step3", tensors, trained_state(members, **state), client)


def opened(folder: Path) -> UniversalSource:
    return UniversalSource(folder, folder.name, Alone())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.pt")}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_we_write_we_read_with_every_tensor_and_the_state(tmp_path: Path, stage: int) -> None:
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    source = ours(tmp_path, zero_stage=stage, ds_config=config)
    write_universal(source, tmp_path / "out" / "u")
    universal = opened(tmp_path / "out" / "u")
    universal.check_own_share()
    assert_equal(contents(universal), contents(source))
    expected = {**source.state, "optimizer": {**source.state["optimizer"], "name": None}}  # type: ignore[dict-item]
    assert dict(universal.state) == expected
    client = universal.client_state()
    assert torch.equal(client.pop("nested")["order"], torch.arange(3))
    assert client == {"epoch": 7}
    assert (tmp_path / "out" / "latest_universal").read_text() == "u"


def test_numbers_of_the_optimizer_beside_the_step_come_back(tmp_path: Path) -> None:
    source = ours(tmp_path)
    scalars = source.state["optimizer"]["scalars"]  # type: ignore[index]
    for numbers in scalars.values():
        numbers |= {"mu_product": 0.75, "zenflow_updates": 7}
    write_universal(source, tmp_path / "universal")
    assert opened(tmp_path / "universal").state["optimizer"]["scalars"] == scalars  # type: ignore[index]


def test_a_moving_loss_scale_comes_back(tmp_path: Path) -> None:
    config = {"fp16": {"enabled": True}, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    write_universal(ours(tmp_path, loss_scaler=SCALED, ds_config=config), tmp_path / "u")
    assert opened(tmp_path / "u").state["loss_scaler"] == SCALED


def test_a_universal_folder_can_be_converted_again(tmp_path: Path) -> None:
    write_universal(ours(tmp_path), tmp_path / "u")
    write_universal(opened(tmp_path / "u"), tmp_path / "again")
    assert_equal(contents(opened(tmp_path / "again")), contents(opened(tmp_path / "u")))
    assert opened(tmp_path / "again").state == opened(tmp_path / "u").state


@pytest.mark.parametrize("stage", ["stage1-fp32", "stage2-bf16"])
def test_stage_files_become_what_the_original_makes_of_them(tmp_path: Path, stage: str) -> None:
    source = open_folder(FIXTURES / stage / "step3", "step3", Alone())
    write_universal(source, tmp_path / "u", inject_missing_state=True)
    theirs = FIXTURES / f"universal-from-{stage}" / "step3_universal"
    aliases = {name for name in files_in(theirs) if "head.weight" in name}  # the owner counts
    assert files_in(tmp_path / "u") == files_in(theirs) - aliases
    for name in sorted(files_in(theirs) - aliases):
        if "/" in name and "optimizer_state" not in name:
            found, expected = load_archive(tmp_path / "u" / name), load_archive(theirs / name)
            assert isinstance(found, dict) == isinstance(expected, dict)
            assert_equal(_as_tensors(found), _as_tensors(expected))
    found, expected = (load_archive(folder / "zero" / "optimizer_state.pt") for folder in (tmp_path / "u", theirs))
    assert {key: value for key, value in found.items() if key in expected and key != "loss_scaler"} == {
        key: value for key, value in expected.items() if key != "loss_scaler"
    }
    assert vars(found["loss_scaler"]) == vars(expected["loss_scaler"])


def _as_tensors(value: Any) -> dict[str, Tensor]:
    return {key: torch.as_tensor(item) for key, item in value.items()} if isinstance(value, dict) else {"": value}


@pytest.mark.parametrize(
    "folder", ["stage3-bf16", "stage1-bf16-fp32acc", "pipeline-fp32", "pipeline-stage1-bf16", "moe-stage2-bf16"]
)
def test_every_kind_of_stage_files_keeps_its_values(tmp_path: Path, folder: str) -> None:
    source = open_folder(FIXTURES / folder / "step3", "step3", Alone())
    write_universal(source, tmp_path / "u", inject_missing_state=True)
    universal = opened(tmp_path / "u")
    found, expected = full_weights(universal), full_weights(source)
    assert_equal({name: value.float() for name, value in found.items()}, {n: v.float() for n, v in expected.items()})
    moments = {name: source.read(name).view(source.shape(name)) for name in source.names("optimizer/")}
    assert_equal({name: universal.read(name).view(universal.shape(name)) for name in universal.names("optimizer/")}, moments)
    assert moments
    assert universal.state["optimizer"] == source.state["optimizer"]
    copied = [
        path.name for path in (FIXTURES / folder / "step3").glob("*mp_rank_*_model_states.pt") if "expert" not in path.name
    ]
    assert sorted(path.name for path in (tmp_path / "u").glob("*.pt")) == sorted(copied)


def test_stage_files_that_say_nothing_of_tensor_parallelism_are_refused_with_the_cure(tmp_path: Path) -> None:
    source = open_folder(FIXTURES / "stage2-bf16" / "step3", "step3", Alone())
    with pytest.raises(MissingUniversalInfoError, match="--inject_missing_state"):
        write_universal(source, tmp_path / "u")
    assert list(tmp_path.iterdir()) == []


def with_info(tmp_path: Path, info: dict[str, Any]) -> CheckpointSource:
    """Stage files whose model states hold `info`."""
    folder = tmp_path / "step3"
    shutil.copytree(FIXTURES / "stage1-fp32" / "step3", folder)
    path = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path), "universal_checkpoint_info": info}, path)
    return open_folder(folder, "step3", Alone())


def test_parameters_are_cut_again_as_the_model_says(tmp_path: Path) -> None:
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [r"fc2\.weight"],
        "vocabulary_parameter_patterns": ["emb"],
        "tp_replicated_parameter_patterns": ["norm"],
        "parameter_with_2_sub_params_cat_dim_0": [r"fc1\.bias"],
        "parameter_with_sub_params": [{"patterns": [r"fc1\.weight"], "shape": (2, -1), "partition_dim": 0}],
    }
    write_universal(with_info(tmp_path, info), tmp_path / "u")

    def fields(name: str) -> dict[str, Any]:
        return {k: v for k, v in load_archive(tmp_path / "u" / "zero" / name / "exp_avg.pt").items() if k != "param"}

    assert fields("fc2.weight") == {"cat_dim": 1}
    assert fields("emb.weight") == {"cat_dim": 0, "vocab_tensor": True}
    assert fields("norm.bias") == {}
    assert fields("fc1.bias") == {"cat_dim": 0, "param_n_sub_params": 2}
    assert fields("fc1.weight") == {"cat_dim": 0, "sub_param_shape": info["parameter_with_sub_params"][0]}  # type: ignore[index]


def test_a_pattern_that_matches_nothing_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    source = with_info(tmp_path, {"tp_replicated_parameter_patterns": ["norm", "nrom"]})
    with pytest.raises(UnmatchedPatternError, match=r"'nrom' \(tp_replicated_parameter_patterns\)"):
        write_universal(source, tmp_path / "u")
    write_universal(source, tmp_path / "u", strict=False)


def test_client_keys_that_the_engine_owns_are_refused(tmp_path: Path) -> None:
    source = PlainSource(tmp_path / "t", trained_tensors(SHAPES), trained_state([list(SHAPES)]), {"module": 1, "fine": 2})
    with pytest.raises(CheckpointError, match="has 'module', which the original keeps"):
        write_universal(source, tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_a_state_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    source = ours(tmp_path)
    assert source.state["optimizer"] is not None
    source.state["optimizer"]["scalars"]["a.bias"] = {"step": 3.0, "history": [1, 2]}
    with pytest.raises(CheckpointError, match=r"'history' of 'a\.bias'"):
        write_universal(source, tmp_path / "out" / "u")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_engine_without_optimizer_gives_weights_alone(tmp_path: Path) -> None:
    tensors = {"module/w": torch.rand(3, 2), "module/b": torch.rand(2)}
    source = PlainSource(tmp_path / "t", tensors, trained_state([], optimizer=None, ds_config=None))
    write_universal(source, tmp_path / "u")
    found = opened(tmp_path / "u")
    assert found.state["optimizer"] is None
    assert_equal(full_weights(found), {name.removeprefix("module/"): value for name, value in tensors.items()})


@pytest.mark.parametrize("workers", [1, 16])
def test_the_number_of_workers_changes_nothing(tmp_path: Path, workers: int) -> None:
    write_universal(ours(tmp_path), tmp_path / "u", workers=workers)
    assert_equal(contents(opened(tmp_path / "u")), contents(ours(tmp_path)))


def test_no_worker_asks_for_more_than_a_block_at_a_time(tmp_path: Path) -> None:
    tensors = trained_tensors({"large": (3 << 20,)})
    source = PlainSource(tmp_path / "t", tensors, trained_state([["large"]]))
    write_universal(source, tmp_path / "u")
    assert source.longest_read <= 1 << 20
    assert_equal(contents(opened(tmp_path / "u")), tensors)


def test_progress_counts_every_file_once(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    write_universal(ours(tmp_path), tmp_path / "u", progress=lambda done, total: told.append((done, total)))
    total = 3 + len(SHAPES) + 3 + 1  # model states, trained, frozen and buffers, optimizer_state.pt
    assert told == [(number, total) for number in range(1, total + 1)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_failure_leaves_the_old_folder_and_its_pointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    write_universal(ours(tmp_path), tmp_path / "out" / "u")
    before = {name: (tmp_path / "out" / "u" / name).read_bytes() for name in files_in(tmp_path / "out" / "u")}
    (tmp_path / "out" / "latest_universal").write_text("older")
    save, calls = save_archive, [0]

    def full_at_last(obj: Any, path: Path) -> int:
        calls[0] += 1
        if path.name == "optimizer_state.pt":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return save(obj, path)

    monkeypatch.setattr(to_universal, "save_archive", full_at_last)
    with pytest.raises(CheckpointError, match=r"could not write .*No space left.*Free space, or give another folder"):
        write_universal(ours(tmp_path), tmp_path / "out" / "u", keep_temp_folder=keep)
    assert {name: (tmp_path / "out" / "u" / name).read_bytes() for name in files_in(tmp_path / "out" / "u")} == before
    assert (tmp_path / "out" / "latest_universal").read_text() == "older"
    left = [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    assert len(left) == keep

    monkeypatch.setattr(to_universal, "save_archive", save)
    write_universal(ours(tmp_path), tmp_path / "out" / "u")  # and cleans up
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest_universal", "u"]


def test_a_replaced_folder_keeps_no_stale_file(tmp_path: Path) -> None:
    stale = [tmp_path / "u" / "zero" / "gone" / "fp32.pt", tmp_path / "u" / "mp_rank_07_model_states.pt"]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"param": torch.zeros(1)}, path)
    write_universal(ours(tmp_path), tmp_path / "u")
    assert not any(path.exists() for path in stale)


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "u").write_text("mine")
    with pytest.raises(ArgumentError, match="is a file"):
        write_universal(ours(tmp_path), tmp_path / "u")
    assert (tmp_path / "u").read_text() == "mine"
