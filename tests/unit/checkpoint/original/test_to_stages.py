"""The original's stage files out of any source: as the original writes them, and read back without loss."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed.checkpoint.agreement import Alone
from deepspeed.checkpoint.opening import open_folder
from deepspeed.checkpoint.original import pickles
from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.reading.stages import StageSource
from deepspeed.checkpoint.original.writing.optimizer_shards import cut_into_sub_groups, flat_shards, padded_shards
from deepspeed.checkpoint.original.writing.to_stages import write_stages
from deepspeed.errors import ArgumentError, CheckpointError
from tests.support.original_net import FIXTURES, full_weights
from tests.unit.checkpoint.original.source_of import (
    SCALED,
    PlainSource,
    contents,
    trained_state,
    trained_tensors,
)

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 5), "empty": (0, 4), "one": (1,)}
MEMBERS = [["a.weight", "b.weight", "empty"], ["a.bias", "one"]]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def ours(tmp_path: Path, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> PlainSource:
    """Two groups, frozen weights, buffers, a tie; bf16 with fp32 masters."""
    stored = trained_tensors(SHAPES)
    stored["module/frozen"] = torch.arange(7).bfloat16() / 3
    stored["module/mean"] = torch.tensor([1.5, -2.5])
    stored["module/count"] = torch.tensor(2**40 + 1)
    state: dict[str, Any] = {
        "shared_parameters": {"head.weight": "b.weight"},
        "frozen_parameters": ["frozen"],
        "buffers": ["mean", "count"],
        "ds_config": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}},
        **changes,
    }
    client = {"epoch": 7, "nested": {"order": torch.arange(3)}}
    return PlainSource(tmp_path / "ours" / "step3", {**stored, **(tensors or {})}, trained_state(MEMBERS, **state), client)


def opened(folder: Path, members: list[list[str]] | None = None) -> StageSource:
    return StageSource(folder, folder.name, Alone(), members)


def _differences(ours: Any, original: Any, where: str) -> list[str]:
    """Places at which two nestings differ; the order of keys counts only where it means something: shapes and mappings."""
    if isinstance(ours, Tensor) and isinstance(original, Tensor):
        is_equal = ours.dtype == original.dtype and torch.equal(ours, original)
        return [] if is_equal else [where]
    if type(ours) is not type(original):
        return [f"{where}: {type(ours).__name__} instead of {type(original).__name__}"]
    if isinstance(ours, dict):
        is_ordered = "shapes" in where or "mappings" in where
        keys = (list if is_ordered else set)(ours), (list if is_ordered else set)(original)
        found = [] if keys[0] == keys[1] else [f"{where}: keys {sorted(set(ours) ^ set(original))}"]
        return found + [
            d for key in original if key in ours for d in _differences(ours[key], original[key], f"{where}/{key}")
        ]
    if isinstance(ours, list | tuple) and not isinstance(ours, torch.Size):
        pairs = zip(ours, original, strict=True)
        return [d for number, (a, b) in enumerate(pairs) for d in _differences(a, b, f"{where}/{number}")]
    if hasattr(ours, "cur_scale"):
        return _differences(vars(ours), vars(original), where)
    return [] if ours == original else [f"{where}: {ours!r} instead of {original!r}"]


ABSENT_ON_LATER_RANKS = "zero_pp_rank_1_mp_rank_00_model_states.pt/shared_params: keys ['head.weight']"
"""The original states ties on the first rank only at stage 3; we state them on every rank."""


@pytest.mark.parametrize(
    ("folder", "stage", "accepted"),
    [
        ("stage1-fp32", 1, []),
        ("stage2-bf16", 2, []),
        ("stage3-bf16", 3, [ABSENT_ON_LATER_RANKS]),
    ],
)
def test_what_is_read_from_the_original_is_written_as_the_original_wrote_it(
    tmp_path: Path, folder: str, stage: Any, accepted: list[str]
) -> None:
    original = FIXTURES / folder / "step3"
    written = write_stages(open_folder(original, "step3", Alone()), tmp_path, stage=stage, world_size=2)
    files = sorted(path.name for path in original.iterdir())
    assert sorted(path.name for path in written.iterdir()) == files
    assert (tmp_path / "latest").read_bytes() == (FIXTURES / folder / "latest").read_bytes()
    pairs = [(name, load_archive(written / name), load_archive(original / name)) for name in files]
    assert [d for name, mine, its in pairs for d in _differences(mine, its, name)] == accepted


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_everything_comes_back_from_every_stage_and_number_of_ranks(
    tmp_path: Path, stage: Any, world_size: int, dtype: Any
) -> None:
    source = ours(tmp_path)
    written = write_stages(source, tmp_path / "out", stage=stage, world_size=world_size, dtype=dtype)
    read = opened(written, MEMBERS if stage == 0 else None)
    expected, found = full_weights(source), full_weights(read)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].to(value.dtype), value, rtol=0, atol=0, msg=name)
    tensors = contents(read)
    for name in source.names("optimizer/"):
        assert torch.equal(tensors[name], source.read(name).view(source.shape(name))), name
    for key in ("global_steps", "global_samples", "skipped_steps", "micro_steps", "shared_parameters", "lr_scheduler"):
        assert read.state[key] == source.state[key], key
    assert read.state["dp_world_size"] == world_size
    assert read.state["zero_stage"] == stage
    assert read.state["buffers"] == ["mean", "count"]
    assert read.state["optimizer"] is not None
    assert source.state["optimizer"] is not None
    for key in ("groups", "members", "scalars"):
        assert read.state["optimizer"][key] == source.state["optimizer"][key], key  # type: ignore[literal-required]
    client = read.client_state()
    assert client["epoch"] == 7
    assert torch.equal(client["nested"]["order"], torch.arange(3))


def test_files_of_16_bit_training_hold_the_weights_rounded_once(tmp_path: Path) -> None:
    source = ours(tmp_path)
    module = load_archive(write_stages(source, tmp_path, stage=1, world_size=1) / "mp_rank_00_model_states.pt")["module"]
    assert torch.equal(module["a.weight"], full_weights(source)["a.weight"].bfloat16())
    assert module["head.weight"].data_ptr() == module["b.weight"].data_ptr()
    assert [module[name].dtype for name in ("frozen", "mean", "count")] == [torch.bfloat16, torch.float32, torch.int64]


def test_sub_groups_follow_the_configured_size(tmp_path: Path) -> None:
    source = ours(tmp_path, ds_config={"zero_optimization": {"stage": 3, "sub_group_size": 6}})
    written = write_stages(source, tmp_path / "out", stage=3, world_size=2)
    shapes = load_archive(written / "zero_pp_rank_1_mp_rank_00_model_states.pt")["param_shapes"]
    assert [list(entry) for entry in shapes] == [["a.weight"], ["b.weight", "empty"], ["a.bias", "one"]]
    inner = load_archive(written / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert [flat.numel() for flat in inner["fp32_flat_groups"]] == [8, 5, 4]
    assert [group["params"] for group in inner["optimizer_state_dict"]["param_groups"]] == [[0, 1], [2]]


def test_a_moving_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    source = ours(tmp_path, ds_config={"fp16": {"enabled": True, "loss_scale_window": 50}}, loss_scaler=SCALED)
    written = write_stages(source, tmp_path / "out", stage=2, world_size=2)
    assert opened(written).state["loss_scaler"] == SCALED
    shard = load_archive(written / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert shard["dynamic_loss_scale"] is True
    assert vars(shard["loss_scaler"])["scale_window"] == 50
    fresh = write_stages(ours(tmp_path), tmp_path / "fresh", stage=2, world_size=2, dtype="fp16")
    assert opened(fresh).state["loss_scaler"]["scale"] == 2.0**16


def test_a_wrapped_optimizer_without_zero_has_its_fp32_weights(tmp_path: Path) -> None:
    source = ours(tmp_path, ds_config={"fp16": {"enabled": True}}, loss_scaler=SCALED)
    optimizer = load_archive(write_stages(source, tmp_path, stage=0, world_size=2) / "mp_rank_00_model_states.pt")[
        "optimizer"
    ]
    assert (optimizer["cur_scale"], optimizer["cur_iter"], optimizer["last_overflow_iter"]) == (2.0**12, 3, 3 - 17 - 2)
    masters = [value for group in optimizer["fp32_groups"] for value in group]
    assert [tuple(value.shape) for value in masters] == [SHAPES[name] for group in MEMBERS for name in group]


def test_memory_is_a_block_whatever_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_BLOCK_NUMEL", 4)
    for stage in (0, 1, 3):
        source = ours(tmp_path)
        write_stages(source, tmp_path / str(stage), stage=stage, world_size=2)
        assert source.longest_read <= 4


def test_a_parameter_that_never_had_a_gradient_has_zero_moments(tmp_path: Path) -> None:
    state = trained_state(MEMBERS)
    assert state["optimizer"] is not None
    del state["optimizer"]["scalars"]["b.weight"]
    source = ours(tmp_path, optimizer=state["optimizer"])
    for key in ("exp_avg", "exp_avg_sq"):
        del source._tensors[f"optimizer/b.weight/{key}"]
    read = opened(write_stages(source, tmp_path / "out", stage=1, world_size=2))
    assert not read.read("optimizer/b.weight/exp_avg").any()
    assert torch.equal(read.read("optimizer/a.weight/exp_avg"), source.read("optimizer/a.weight/exp_avg"))


def test_an_engine_without_optimizer_is_written_without_zero_only(tmp_path: Path) -> None:
    source = ours(tmp_path, optimizer=None)
    assert (
        load_archive(write_stages(source, tmp_path / "out", stage=0, world_size=1) / "mp_rank_00_model_states.pt")[
            "optimizer"
        ]
        is None
    )
    with pytest.raises(CheckpointError, match=r"saved without an optimizer.*Export for ZeRO stage 0"):
        write_stages(source, tmp_path / "sharded", stage=2, world_size=1)
    assert not (tmp_path / "sharded").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("layer.deepspeed_moe.experts.deepspeed_experts.0.w", "experts"), ("tied_modules.emb.weight", "a pipeline's layers")],
)
def test_experts_and_pipelines_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    source = ours(tmp_path, {f"module/{name}": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=f"holds {kind}"):
        write_stages(source, tmp_path / "out", stage=1, world_size=2)


def test_state_that_a_flat_shard_has_no_room_for_is_refused_by_name(tmp_path: Path) -> None:
    source = ours(tmp_path, {"optimizer/a.weight/row": torch.zeros(5)})
    with pytest.raises(CheckpointError, match=r"state 'row' of 'a.weight' has shape \(5,\).*ZeRO stage 0"):
        write_stages(source, tmp_path / "flat", stage=2, world_size=2)
    write_stages(source, tmp_path / "whole", stage=0, world_size=2)
    state = trained_state(MEMBERS)
    assert state["optimizer"] is not None
    state["optimizer"]["scalars"]["b.weight"]["step"] = 9.0
    source = ours(tmp_path, optimizer=state["optimizer"])
    with pytest.raises(CheckpointError, match=r"'step': 3.0\} for 'a.weight' and \{'step': 9.0\} for 'b.weight'"):
        write_stages(source, tmp_path / "flat", stage=3, world_size=2)
    assert list((tmp_path / "flat").iterdir()) == []


def test_groups_without_names_are_refused(tmp_path: Path) -> None:
    state = trained_state(MEMBERS)
    assert state["optimizer"] is not None
    state["optimizer"]["members"] = []
    with pytest.raises(CheckpointError, match="has 2 parameter groups but does not say which parameters are in each"):
        write_stages(ours(tmp_path, optimizer=state["optimizer"]), tmp_path / "out", stage=1, world_size=2)


def test_client_keys_that_the_engine_owns_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = ours(tmp_path)
    source._client["global_steps"] = 3
    with pytest.raises(CheckpointError, match=r"client_state of .* has 'global_steps'"):
        write_stages(source, tmp_path / "out", stage=1, world_size=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_tag_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out" / "step3").mkdir(parents=True)
    (tmp_path / "out" / "step3" / "mine").touch()
    with pytest.raises(ArgumentError, match="step3 exists already"):
        write_stages(ours(tmp_path), tmp_path / "out", stage=1, world_size=2)
    written = write_stages(ours(tmp_path), tmp_path / "out", "other", stage=1, world_size=2, with_latest=False)
    assert written == tmp_path / "out" / "other"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["other", "step3"]


@pytest.mark.parametrize("wrong", [{"stage": 4}, {"world_size": 0}, {"dtype": "fp8"}])
def test_unusable_arguments_are_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"stage": 1, "world_size": 2, **wrong}
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        write_stages(ours(tmp_path), tmp_path / "out", **arguments)


def test_the_order_by_ranks_is_not_kept_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 2, "round_robin_gradients": True}
    with caplog.at_level(logging.WARNING):
        written = write_stages(ours(tmp_path, ds_config={"zero_optimization": zero}), tmp_path / "o", stage=2, world_size=2)
    assert "resume the original with round_robin_gradients=false" in caplog.text
    stored = load_archive(written / "mp_rank_00_model_states.pt")["ds_config"]
    assert stored == {"zero_optimization": {"stage": 2}}


def test_progress_counts_every_file_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_stages(ours(tmp_path), tmp_path / "o", stage=3, world_size=3, progress=lambda *done: seen.append(done))
    assert seen == [(number, 6) for number in range(1, 7)]


NUMELS = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(lambda numels: {str(i): n for i, n in enumerate(numels)})


@given(numels=NUMELS, world_size=st.integers(1, 9))
def test_every_element_lies_on_one_rank_and_the_padding_at_the_end(numels: dict[str, int], world_size: int) -> None:
    for shards in (flat_shards(numels, world_size), padded_shards(numels, world_size)):
        owned = [
            (p.name, e) for shard in shards for p in shard.pieces for e in range(p.param_start, p.param_start + p.numel)
        ]
        assert sorted(owned) == sorted((name, e) for name, numel in numels.items() for e in range(numel))
        assert len({shard.numel for shard in shards}) == 1
        for shard in shards:
            taken = [e for p in shard.pieces for e in range(p.start, p.start + p.numel)]
            assert len(set(taken)) == len(taken)
            assert all(0 <= e < shard.numel - shard.padding_numel for e in taken)
    flat = flat_shards(numels, world_size)
    assert flat[0].numel % 2 == 0
    assert sum(shard.numel - shard.padding_numel for shard in flat) == sum(numels.values())
    assert world_size * flat[0].numel - sum(numels.values()) < 2 * world_size


@given(numels=NUMELS, world_size=st.integers(1, 4), size=st.integers(1, 50))
def test_sub_groups_keep_the_order_and_end_when_they_are_large_enough(
    numels: dict[str, int], world_size: int, size: int
) -> None:
    cut = cut_into_sub_groups(numels, world_size, size)
    assert [name for group in cut for name in group] == list(numels)
    shards = [[-(-numels[name] // world_size) for name in group] for group in cut]
    assert all(sum(group[:-1]) < size for group in shards)
    assert all(sum(group) >= size for group in shards[:-1])
