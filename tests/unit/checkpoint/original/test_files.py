"""The grammar of the stage files' names."""

from __future__ import annotations

import pytest

from deepspeed.checkpoint.original.files import (
    ExpertFile,
    ExpertOptimizerFile,
    LayerFile,
    ModelFile,
    OptimizerFile,
    StageFile,
    StageFiles,
    parse_file_name,
)
from tests.support.original_net import FIXTURES


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("mp_rank_00_model_states.pt", ModelFile(0, None, "")),
        ("mp_rank_113_model_states.pt", ModelFile(113, None, "")),
        ("zero_pp_rank_12_mp_rank_03_model_states.pt", ModelFile(3, 12, "")),
        ("zero_pp_rank_5_mp_rank_00_optim_states.pt", OptimizerFile(0, 5, False, "")),
        ("bf16_zero_pp_rank_5_mp_rank_01_optim_states.pt", OptimizerFile(1, 5, True, "")),
        ("layer_07-model_states.pt", LayerFile(7, None, "")),
        ("layer_07-model_01-model_states.pt", LayerFile(7, 1, "")),
        ("layer_0_expert_11_mp_rank_00_model_states.pt", ExpertFile(0, 11, 0, "")),
        ("expert_3_mp_rank_00_model_states.pt", ExpertFile(None, 3, 0, "")),
        ("expp_rank_1_mp_rank_00_optim_states.pt", ExpertOptimizerFile(0, 1, "")),
    ],
)
def test_every_name_says_what_the_file_holds(name: str, meaning: StageFile) -> None:
    found = parse_file_name(name)
    assert found is not None
    assert type(found) is type(meaning)
    assert {**vars(found), "name": ""} == vars(meaning)
    assert found.name == name


@pytest.mark.parametrize(
    "name",
    [
        "latest",
        "zero_to_fp32.py",
        "manifest.json",
        "mp_rank_00_model_states.pt.tmp",
        "xmp_rank_00_model_states.pt",
        "notes.pt",
    ],
)
def test_other_names_are_left_to_the_user(name: str) -> None:
    assert parse_file_name(name) is None


def test_files_are_sorted_by_number_and_kind() -> None:
    names = [f"zero_pp_rank_{d}_mp_rank_0{m}_optim_states.pt" for d in (10, 9, 0) for m in (1, 0)]
    files = StageFiles.of([*names, "layer_10-model_states.pt", "layer_02-model_states.pt", "user.txt"])
    assert [(f.model_rank, f.data_rank) for f in files.optimizers] == [(0, 0), (0, 9), (0, 10), (1, 0), (1, 9), (1, 10)]
    assert [f.layer for f in files.layers] == [2, 10]
    assert "user.txt" not in files.names
    assert len(files.names) == 8


def test_every_file_of_the_fixtures_is_known() -> None:
    for folder in FIXTURES.glob("*/step3"):
        names = {path.name for path in folder.glob("*.pt")}
        assert set(StageFiles.of(names).names) == names
