"""The published classes that see a checkpoint of the original layer by layer and rank by rank, also as fewer ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.original.archive import load_archive
from deepspeed.checkpoint.original.pickles import save_archive
from deepspeed.checkpoint.original.published.deepspeed_checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.original.published.merging import merge_state
from deepspeed.checkpoint.original.published.reshape import model_3d_desc, reshape_meg_2d_parallel
from deepspeed.checkpoint.original.published.stage_file_names import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from deepspeed.checkpoint.original.published.zero_checkpoint import ZeROCheckpoint
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

FIXTURES = Path(__file__).parents[3] / "fixtures" / "original"
PIPELINE = FIXTURES / "pipeline-stage1-bf16" / "step3"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# -- layers and ranks of a pipeline -------------------------------------------------------------------------------------


def test_the_layers_of_a_pipeline_are_found_in_order() -> None:
    checkpoint = DeepSpeedCheckpoint(PIPELINE)
    assert (checkpoint.pp_degree, checkpoint.tp_degree, checkpoint.dp_degree) == (2, 1, 1)
    assert checkpoint.layer_keys == ["layer_00", "layer_01", "layer_02", "layer_03"]
    assert checkpoint.get_embedding_files(0) == [str(PIPELINE / "layer_00-model_states.pt")]
    assert list(checkpoint.get_embedding_state(0)) == ["weight"]
    assert checkpoint.get_final_norm_layer_id() == "layer_03"
    assert [checkpoint.get_pp_transformer_map(stage) for stage in (0, 1)] == [["layer_01"], ["layer_02"]]
    (layer,) = checkpoint.get_transformer_state(0, 1)
    assert torch.equal(layer["a.weight"], load_archive(PIPELINE / "layer_02-model_states.pt")["a.weight"])


def test_two_stages_seen_as_one_have_all_layers_and_both_files() -> None:
    checkpoint = DeepSpeedCheckpoint(PIPELINE, pp_degree=1)
    assert checkpoint.is_change_pp_degree()
    assert not checkpoint.is_change_tp_degree()
    assert checkpoint.get_pp_transformer_map(0) == ["layer_01", "layer_02"]
    assert [Path(file).name for file in checkpoint.get_2d_parallel_files(0, 0)] == [
        "mp_rank_00_model_states.pt",
        "mp_rank_01_model_states.pt",
    ]
    assert checkpoint.get_2d_parallel_state(0, 0)["note"] == "hello"
    state = checkpoint.get_zero_checkpoint_state(0, 0, 0)["optimizer_state_dict"]
    parts = [
        load_archive(PIPELINE / f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")["optimizer_state_dict"]
        for rank in (0, 1)
    ]
    expected = torch.cat([part["single_partition_of_fp32_groups"][0] for part in parts])
    assert torch.equal(state["single_partition_of_fp32_groups"][0], expected)
    assert "param_slice_mappings" not in state


def test_what_the_client_stored_is_asked_for_by_name(tmp_path: Path) -> None:
    assert DeepSpeedCheckpoint(PIPELINE).get_iteration() == 3
    assert DeepSpeedCheckpoint(PIPELINE).get_args() is None
    assert DeepSpeedCheckpoint(PIPELINE).get_checkpoint_info("epoch") == 7
    save_archive({"iteration": 41, "args": {"hidden": 8}, "global_steps": 3}, tmp_path / "mp_rank_00_model_states.pt")
    assert DeepSpeedCheckpoint(tmp_path).get_iteration() == 41
    assert DeepSpeedCheckpoint(tmp_path).get_args() == {"hidden": 8}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(PIPELINE, tmp_path / "tag")
    DeepSpeedCheckpoint(tmp_path / "tag").validate_files()
    file = tmp_path / "tag" / "layer_02-model_states.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointDamagedError, match=r"layer_02-model_states\.pt"):
        DeepSpeedCheckpoint(tmp_path / "tag").validate_files()


def test_what_a_checkpoint_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no \\*_model_states"):
        DeepSpeedCheckpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no optimizer shards"):
        ZeROCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no layer files"):
        DeepSpeedCheckpoint(FIXTURES / "stage1-fp32" / "step3").get_embedding_state(0)
    with pytest.raises(CheckpointNotFoundError, match="without ZeRO"):
        DeepSpeedCheckpoint(FIXTURES / "pipeline-fp32" / "step3").get_zero_files(0, 0, 0)
    with pytest.raises(ArgumentError, match="tp_index=1"):
        DeepSpeedCheckpoint(PIPELINE).get_embedding_state(1)


# -- tensor ranks -------------------------------------------------------------------------------------------------------


def test_slices_of_tensor_ranks_are_joined_as_megatron_cuts_them(tmp_path: Path) -> None:
    whole = {
        "input_layernorm.weight": torch.arange(4.0),
        "self_attention.query_key_value.weight": torch.arange(24.0).view(6, 4),
        "self_attention.query_key_value.bias": torch.zeros(6),
        "self_attention.dense.weight": torch.arange(16.0).view(4, 4),
        "self_attention.dense.bias": torch.ones(4),
        "mlp.dense_4h_to_h.weight": torch.arange(32.0).view(4, 8),
    }
    cut = {
        "self_attention.query_key_value.weight": 0,
        "self_attention.query_key_value.bias": 0,
        "self_attention.dense.weight": 1,
        "mlp.dense_4h_to_h.weight": 1,
    }
    for rank in (0, 1):
        slices = {name: value.chunk(2, cut[name])[rank] if name in cut else value for name, value in whole.items()}
        save_archive({"module": None}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
        for layer in (1, 2, 3):
            save_archive(slices, tmp_path / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    as_written = DeepSpeedCheckpoint(tmp_path)
    assert (as_written.tp_degree, as_written.pp_degree) == (2, 1)
    torch.testing.assert_close(
        as_written.get_transformer_state(1, 0)[0]["self_attention.dense.weight"], whole["self_attention.dense.weight"][:, 2:]
    )
    (joined,) = DeepSpeedCheckpoint(tmp_path, tp_degree=1).get_transformer_state(0, 0)
    for name, value in whole.items():
        torch.testing.assert_close(joined[name], value, rtol=0, atol=0)


# -- shards -------------------------------------------------------------------------------------------------------------


def test_shards_of_two_ranks_seen_as_one_hold_the_group_without_padding(tmp_path: Path) -> None:
    for rank, (numel, padding) in enumerate([(4, 0), (4, 3)]):
        flat = torch.arange(4.0) + 10 * rank
        state = {
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(3.0), "exp_avg": flat}},
                "param_groups": [{"lr": 1.0}],
            },
            "single_partition_of_fp32_groups": [flat[: numel - padding]],
            "group_paddings": [padding],
            "param_slice_mappings": [{}],
        }
        save_archive({"optimizer_state_dict": state}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    zero = ZeROCheckpoint(tmp_path)
    assert zero.get_src_dp_degree() == zero.get_src_world_size() == 2
    assert zero.get_file_indices_for_rank(0, 0, 1) == [1]
    zero.reshape(model_3d_desc(1, 1, 1))
    assert len(zero.get_files_for_rank(0, 0, 0)) == 2
    merged = zero.get_state_for_rank(0, 0, 0)["optimizer_state_dict"]
    inner = merged["base_optimizer_state"]["state"][0]
    assert inner["exp_avg"].tolist() == merged["single_partition_of_fp32_groups"][0].tolist() == [0.0, 1.0, 2.0, 3.0, 10.0]
    assert float(inner["step"]) == 3.0
    assert merged["group_paddings"] == [0]
    assert merged["base_optimizer_state"]["param_groups"] == [{"lr": 1.0}]
    padded = zero.get_state_for_rank(0, 0, 0, keys_to_ignore=["param_slice_mappings"], strip_tensor_paddings=False)
    assert padded["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"].numel() == 8
    assert "param_slice_mappings" not in padded["optimizer_state_dict"]


# -- arithmetic ---------------------------------------------------------------------------------------------------------


def test_neighbouring_stages_and_tensor_ranks_become_one() -> None:
    assert reshape_meg_2d_parallel(4, 2, 2, 1).ranks == {(0, 0): [0, 1, 2, 3], (1, 0): [4, 5, 6, 7]}
    merged = reshape_meg_2d_parallel(2, 4, 1, 2)
    assert (merged.get_data(0, 0), merged.get_data(0, 1)) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert merged.get_data() == [0, 1, 4, 5, 2, 3, 6, 7]
    with pytest.raises(ArgumentError, match="old_tp_degree=2, new_tp_degree=4"):
        reshape_meg_2d_parallel(2, 2, 1, 4)
    with pytest.raises(ArgumentError, match="no place pp_index=1"):
        merged.get_data(1, 0)


def test_data_ranks_are_merged_after_the_places() -> None:
    eight = model_3d_desc(pp_degree=2, tp_degree=2, dp_degree=4)
    assert (eight.get_desc(), eight.world_size()) == ("PP,TP,DP = (2, 2, 4)", 16)
    assert [part.get_data(0, 0) for part in eight.reshape(model_3d_desc(1, 1, 2))] == [
        [0, 4, 8, 12, 1, 5, 9, 13],
        [2, 6, 10, 14, 3, 7, 11, 15],
    ]
    assert [part.get_data(0, 1) for part in eight.reshape(model_3d_desc(1, 2, 4))] == [[1, 5], [9, 13], [3, 7], [11, 15]]
    assert eight.is_valid(1, 1, 3) == (True, [])
    assert eight.is_valid(2, 1, 3) == (False, ["PP index 2 is not within its degree 2"])
    assert eight.can_reshape(model_3d_desc(4, 2, 4)) == (False, ["PP: 2 ranks cannot become more, 4"])
    with pytest.raises(ArgumentError, match="cannot be shared evenly"):
        eight.reshape(model_3d_desc(2, 2, 3))


@given(st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(1, 3)] * 3))
def test_every_rank_has_one_new_place(target: tuple[int, int, int], factors: tuple[int, int, int]) -> None:
    source = model_3d_desc(*(degree * factor for degree, factor in zip(target, factors, strict=True)))
    maps = source.reshape(model_3d_desc(*target))
    assert len(maps) == target[2]
    assert sorted(rank for part in maps for rank in part.get_data()) == list(range(source.world_size()))


def test_states_are_merged_by_structure() -> None:
    merged = merge_state(
        {"t": torch.ones(2), "deep": {"u": [torch.zeros(1)]}, "n": 1, "step": torch.tensor(2.0), "same": torch.ones(1)},
        {
            "t": torch.zeros(1),
            "deep": {"u": [torch.ones(1)]},
            "n": 2,
            "step": torch.tensor(2.0),
            "same": torch.ones(1),
            "x": 3,
        },
        key_list=["same"],
    )
    assert merged["t"].tolist() == [1.0, 1.0, 0.0]
    assert merged["deep"]["u"][0].tolist() == [0.0, 1.0]
    assert (merged["n"], float(merged["step"]), merged["x"], merged["same"].numel()) == (1, 2.0, 3, 1)
    with pytest.raises(ArgumentError, match="lists of 1 and 2 entries"):
        merge_state([torch.ones(1)], [torch.ones(1), torch.ones(1)])


def test_file_names_are_spelled_as_published() -> None:
    assert get_layer_ckpt_name_for_rank("B", "layer_03", 1) == "B/layer_03-model_01_model_states.pt"
    assert get_model_ckpt_name_for_rank("B", "01") == "B/mp_rank_01_model_states.pt"
    assert get_zero_ckpt_name_for_rank("B", 3, 2) == "B/zero_pp_rank_3_mp_rank_02_optim_states.pt"
