from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspeed.checkpoint.disk.folders import new_token, working_folder
from deepspeed.checkpoint.export.model_file import ModelEntry, write_model_file
from deepspeed.errors import CheckpointError
from tests.unit.checkpoint.faulty_storage import FullDisk

WEIGHT = torch.arange(6.0).view(2, 3).t()  # not contiguous
ENTRIES = [ModelEntry(["a", "tied"], torch.float32, (3, 2)), ModelEntry(["flag"], torch.bool, ())]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def _values() -> Iterator[tuple[str, Tensor]]:
    yield "a", WEIGHT
    yield "flag", torch.tensor(True)


@pytest.mark.parametrize("name", ["m.bin", "m.safetensors"])
def test_tied_names_and_odd_strides_come_back_as_values(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / name
    write_model_file(path, ENTRIES, _values())
    got = torch.load(path, weights_only=True) if name == "m.bin" else load_file(path)
    assert got.keys() == {"a", "tied", "flag"}
    assert torch.equal(got["a"], WEIGHT)
    assert torch.equal(got["tied"], WEIGHT)
    assert got["flag"].item() is True
    assert [*path.parent.iterdir()] == [path]


def test_entries_that_are_no_tensors_go_into_a_torch_file_only(tmp_path: Path) -> None:
    others = {"layer._extra_state": {"scale": 2.0, "names": ["x"]}}
    write_model_file(tmp_path / "m.bin", ENTRIES, _values(), others=others)
    assert torch.load(tmp_path / "m.bin", weights_only=True)["layer._extra_state"] == {"scale": 2.0, "names": ["x"]}
    with pytest.raises(CheckpointError, match=r"cannot hold 'layer\._extra_state'.*Save a \.bin file"):
        write_model_file(tmp_path / "m.safetensors", ENTRIES, _values(), others=others)
    assert [path.name for path in tmp_path.iterdir()] == ["m.bin"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_text("old")
    for nbytes in (0, 100, 1000):
        with pytest.raises(CheckpointError, match=r"No space left.*A file that was there is intact. Free space"):
            write_model_file(path, ENTRIES, _values(), storage=FullDisk(nbytes))
        assert path.read_text() == "old"
        assert [*tmp_path.iterdir()] == [path]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    working_folder(path, new_token()).write_text("half")
    write_model_file(path, ENTRIES, _values())
    assert [*tmp_path.iterdir()] == [path]
