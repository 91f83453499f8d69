from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import Piece, UnstorableStateError
from deepspeed.checkpoint.disk.storage import Storage, WriteOptions
from deepspeed.checkpoint.save.engines import (
    CheckpointCommitInfo,
    CheckpointEngine,
    DataStatesCheckpointEngine,
    DecoupledCheckpointEngine,
    FastCheckpointEngine,
    MockStorage,
    TorchCheckpointEngine,
    checkpoint_engine_of,
    plan_of,
    storage_of,
)
from deepspeed.config.checkpoint import CheckpointConfig, DataStatesConfig, WriterConfig
from deepspeed.errors import CheckpointDamagedError, CheckpointError
from tests.support.checkpoints import write_checkpoint


def _checkpoint(**keys: Any) -> CheckpointConfig:
    return CheckpointConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, WriteOptions(block_nbytes=67_108_864, block_count=2, is_direct=True)),
        ({"io_buffer_size": 4096, "io_buffer_double": False}, WriteOptions(4096, 1, True)),
        ({"io_buffer_size": 4096, "io_multiplier": 3}, WriteOptions(4096, 6, True)),
        ({"type": "python"}, WriteOptions(67_108_864, 2, False)),
    ],
)
def test_the_keys_of_the_writer_reach_the_storage(keys: dict[str, Any], options: WriteOptions) -> None:
    assert storage_of(WriterConfig(**keys)).options == options


def test_without_a_writer_block_the_storage_has_its_own_defaults() -> None:
    assert storage_of(None).options == WriteOptions()


def test_the_mock_writer_writes_nothing_and_touches_nothing(tmp_path: Path) -> None:
    pieces = [Piece.whole("module/w", torch.ones(5))]
    write_checkpoint(tmp_path, "t", pieces, {"step": 1}, {}, rank=0, world_size=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for tag in ("t", "u"):
        mock = MockStorage()
        write_checkpoint(tmp_path, tag, pieces, {"step": 2}, {}, rank=0, world_size=1, storage=mock)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("keys", "datastates", "kind", "is_background", "waits"),
    [
        ({}, None, TorchCheckpointEngine, False, False),
        ({"writer": {}}, None, FastCheckpointEngine, False, False),
        ({"async_save": True}, None, DecoupledCheckpointEngine, True, False),
        ({"writer": {"decoupled": True}}, None, DecoupledCheckpointEngine, True, True),
        ({}, {}, DataStatesCheckpointEngine, True, False),
        ({"writer": {"decoupled": True}}, {"host_cache_size": 2}, DataStatesCheckpointEngine, True, True),
    ],
)
def test_the_configuration_says_how_saves_go_on(
    keys: dict[str, Any], datastates: dict[str, Any] | None, kind: type, is_background: bool, waits: bool
) -> None:
    checkpoint = _checkpoint(**keys)
    block = None if datastates is None else DataStatesConfig(**datastates)
    plan, engine = plan_of(checkpoint, block), checkpoint_engine_of(checkpoint, block)
    assert (plan.is_background, plan.waits_at_boundary) == (is_background, waits)
    assert plan.limit_nbytes == (2e9 if datastates else float("inf"))
    assert type(engine) is kind
    assert engine.is_decoupled() == is_background


@pytest.mark.parametrize("is_shown", [False, True])
def test_statistics_are_shown_on_request(is_shown: bool) -> None:
    assert plan_of(_checkpoint(writer={"show_statistics": is_shown}), None).shows_statistics == is_shown


def _state() -> dict[str, Any]:
    return {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3).bfloat16(), "step": 4, "nested": {"lr": [0.1, (1, 2)]}}


def test_a_state_dict_comes_back_equal(tmp_path: Path) -> None:
    engine = CheckpointEngine()
    engine.makedirs(tmp_path / "a" / "b")
    engine.makedirs(tmp_path / "a" / "b", exist_ok=True)
    path = tmp_path / "a" / "b" / "state.pt"
    for number in (3, 4):
        engine.save({**_state(), "step": number}, path)
    found = engine.load(path, map_location="cpu")
    assert found.keys() == _state().keys()
    assert torch.equal(found["w"], _state()["w"])
    assert torch.equal(found["half"], _state()["half"])
    assert (found["step"], found["nested"]) == (4, {"lr": [0.1, (1, 2)]})
    assert [entry.name for entry in path.parent.iterdir()] == ["state.pt"]
    assert b"PK" not in path.read_bytes()[:4]


def test_a_file_of_torch_is_read_without_running_its_code(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "plain.pt")
    assert torch.equal(CheckpointEngine().load(tmp_path / "plain.pt")["w"], _state()["w"])
    torch.save({"path": Path("/")}, tmp_path / "object.pt")
    with pytest.raises(CheckpointError, match="Path"):
        CheckpointEngine().load(tmp_path / "object.pt")


def test_a_state_dict_that_needs_a_pickle_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(UnstorableStateError, match=r"state_dict\['thing'\]"):
        CheckpointEngine().save({"thing": object()}, tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"\x08" + b"\0" * 7 + b"{}      "])
def test_another_file_is_settled_apart(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match="f"):
        CheckpointEngine().load(tmp_path / "f")


def test_a_commit_waits_and_forgets_what_it_was_about() -> None:
    engine, waited = CheckpointEngine(), []
    engine.wait_for_save = lambda: waited.append(True)
    info = CheckpointCommitInfo(tag="t", save_dir="/ck", save_latest=True)
    engine.create(info)
    assert engine.get_commit_info() == info
    assert engine.commit(info)
    assert engine.get_commit_info() is None
    engine.cleanup()
    assert waited == [True, True]
    assert engine.is_data_parallel_writer(1)
    assert not engine.preserves_storage_sharing()


def test_another_storage_can_be_plugged_in(tmp_path: Path) -> None:
    class Counting(Storage):
        count = 0

        def create(self, path: Path) -> Any:
            self.count += 1
            return super().create(path)

    storage = Counting()
    CheckpointEngine(storage=storage).save({"a": 1}, tmp_path / "f")
    assert storage.count == 1
