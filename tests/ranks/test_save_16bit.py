"""The model's weights as one file, at every stage and for every kind of weight, without the whole model in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed.errors import CheckpointError
from tests.support.engines import config, make_engine, zero
from tests.support.ranks import run_ranks

MIB = 1 << 20


class Everything(nn.Module):
    """Tied and frozen weights, buffers of several types, a weight without elements, two optimizer groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.emb = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight
        self.spare = nn.Linear(3, 3)  # of no optimizer
        self.none = nn.Parameter(torch.empty(0, 2))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def _load(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def _everywhere(rank: int, world_size: int, folder: str, stage: int) -> None:
    model = Everything()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [{"params": [*model.first.parameters(), model.none]}, {"params": [model.emb.weight, *model.last.parameters()]}]
    keys = {"stage3_param_persistence_threshold": 4, "stage3_gather_16bit_weights_on_model_save": True}
    blocks = {**zero(stage, **keys), "bf16": {"enabled": True}}
    engine = make_engine(model, config(**blocks), optimizer=torch.optim.AdamW(groups, lr=1e-2))
    wanted = {name: values[name].to(held.dtype) for name, held in engine.module.state_dict().items()}
    assert wanted["emb.weight"].dtype == torch.bfloat16
    for name, excludes in (("m.bin", False), ("m.safetensors", False), ("without_frozen.bin", True)):
        assert engine.save_16bit_model(folder, name, exclude_frozen_parameters=excludes)
        got = _load(Path(folder, name))
        assert got.keys() == {key for key in wanted if not (excludes and key.startswith("frozen."))}
        for key, value in got.items():
            assert value.dtype == wanted[key].dtype, key
            assert torch.equal(value, wanted[key]), key
    whole = engine._consolidated_16bit_state_dict()
    assert (whole is None) == (rank > 0)
    if whole is not None:
        assert [*whole] == [*wanted]
        assert all(torch.equal(value, wanted[name]) for name, value in whole.items())
        assert whole["head.weight"] is whole["emb.weight"]
        Everything().load_state_dict(whole, strict=True)


@pytest.mark.parametrize("stage", [1, 3])
def test_every_kind_of_weight_is_in_the_file(tmp_path: Path, stage: int) -> None:
    run_ranks(_everywhere, 2, str(tmp_path), stage)


def _fails_together(rank: int, world_size: int, folder: str) -> bytes:
    model = Everything()
    keys = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(model, config(**zero(3, **keys)), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    Path(folder, "file").touch()
    with pytest.raises(CheckpointError, match=r"could not write the model's weights into .*file/m.bin"):
        engine.save_16bit_model(f"{folder}/file", "m.bin")
    assert engine.save_16bit_model(folder, "m.bin")  # the ranks are still in step
    return Path(folder, "m.bin").read_bytes()[:4]


def test_a_refusal_of_the_system_is_one_error_on_all_ranks_and_training_can_go_on(tmp_path: Path) -> None:
    assert run_ranks(_fails_together, 2, str(tmp_path)) == [b"PK\x03\x04"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m.bin"]


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _peak(rank: int, world_size: int, folder: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    keys = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(model, config(**zero(3, **keys)), optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    engine.save_16bit_model(folder, "warm.bin")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    engine.save_16bit_model(folder, "m.bin")
    return _status("VmHWM") - before


def test_no_rank_holds_the_whole_model_while_it_is_saved(tmp_path: Path) -> None:
    first, second = run_ranks(_peak, 2, str(tmp_path))
    assert (tmp_path / "m.bin").stat().st_size > 64 * MIB
    assert first < 40 * MIB  # a bucket, and the blocks on their way to the disk
    assert second < 24 * MIB
