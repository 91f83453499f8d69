from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.checkpoint import Piece, list_tags, open_checkpoint
from deepspeed.checkpoint.disk.storage import HashedFile, Storage
from deepspeed.checkpoint.save import snapshot as snapshots
from deepspeed.checkpoint.save.background import SavePlan, Saver, statistics
from deepspeed.checkpoint.save.engines import CheckpointEngine, MockStorage
from deepspeed.checkpoint.save.tiers import tiers_of
from deepspeed.checkpoint.save.writer import Committed, Content
from deepspeed.config.checkpoint import CheckpointConfig, NebulaConfig
from deepspeed.errors import CheckpointError
from tests.unit.checkpoint.faulty_storage import Refusing

BEHIND = SavePlan(is_background=True)


class Gated(Storage):
    """Shards are not begun before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def create(self, path: Path) -> HashedFile:
        if path.name.startswith("rank_"):
            assert self.gate.wait(30)
        return super().create(path)


def _saver(plan: SavePlan = BEHIND, storage: Storage | None = None, **rules: Any) -> Saver:
    tiers = tiers_of(CheckpointConfig(**rules), NebulaConfig())
    return Saver(plan, 0, 1, CheckpointEngine(storage=storage), tiers)


def _content(value: float, **client_state: Any) -> Content:
    pieces = [Piece.whole("module/w", torch.full((5,), value))]
    return Content(pieces, lambda: {"step": 1}, lambda: client_state, lambda: {"rng": torch.ones(2)})


def test_a_save_returns_before_it_writes_and_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    gated = Gated()
    saver = _saver(storage=gated)
    weights = torch.full((5,), 1.0)
    saver.save(tmp_path, "t", Content([Piece.whole("module/w", weights)], dict, dict, dict))
    weights.fill_(2.0)
    assert saver.is_writing
    assert not (tmp_path / "t").exists()
    gated.gate.set()
    saver.wait()
    assert open_checkpoint(tmp_path).read("module/w").tolist() == [1.0] * 5
    saver.close()


def test_without_a_background_the_save_is_there_when_it_returns(tmp_path: Path) -> None:
    saver = _saver(SavePlan())
    saver.save(tmp_path, "t", _content(1.0))
    assert open_checkpoint(tmp_path).tag == "t"


def test_a_relative_folder_is_the_one_of_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated()
    saver = _saver(storage=gated)
    monkeypatch.chdir(tmp_path)
    saver.save(Path("saved"), "t", _content(1.0))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    gated.gate.set()
    saver.close()
    assert open_checkpoint(tmp_path / "saved").tag == "t"


def test_an_error_is_logged_at_once_and_raised_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusing = Refusing(lambda name, path: name == "create" and path.name == "rank_00000.safetensors")
    saver = _saver(storage=refusing)
    with caplog.at_level(logging.ERROR, logger="DeepSpeed"):
        saver.save(tmp_path, "t", _content(1.0))
        with pytest.raises(CheckpointError, match=r"save of checkpoint 't' .* failed\. could not write rank_00000"):
            saver.wait()
    saver.wait()
    saver.close()
    assert not (tmp_path / "t").exists()


def test_an_unforeseen_error_of_the_thread_is_raised_too(tmp_path: Path) -> None:
    class Broken(Storage):
        def create(self, path: Path) -> HashedFile:
            raise ZeroDivisionError("a bug")

    saver = _saver(storage=Broken())
    saver.save(tmp_path, "t", _content(1.0))
    with pytest.raises(CheckpointError, match="ZeroDivisionError: a bug"):
        saver.close()


def test_an_object_that_cannot_be_stored_is_refused_by_the_call(tmp_path: Path) -> None:
    saver = _saver()
    with pytest.raises(CheckpointError, match=r"client_state\['thing'\]"):
        saver.save(tmp_path, "t", _content(1.0, thing=object()))
    saver.close()
    assert not list(tmp_path.iterdir())


def test_a_boundary_waits_only_where_the_plan_says_so(tmp_path: Path) -> None:
    for waits in (False, True):
        gated = Gated()
        saver = _saver(SavePlan(is_background=True, waits_at_boundary=waits), gated)
        saver.save(tmp_path, "t", _content(1.0))
        if waits:
            gated.gate.set()
        saver.at_boundary(lambda: [])
        assert saver.is_writing == (not waits)
        gated.gate.set()
        saver.close()


def test_memory_is_made_ready_at_the_first_boundary(tmp_path: Path) -> None:
    saver = _saver()
    saver.at_boundary(lambda: _content(1.0).pieces)
    saver._memory._finish_making()
    nbytes = saver._memory.nbytes
    assert nbytes > 20
    saver.save(tmp_path, "t", _content(1.0))
    assert saver._memory.nbytes == nbytes
    saver.close()
    assert saver._memory.nbytes == 0


def test_memory_in_which_a_save_goes_on_is_not_made_anew(tmp_path: Path) -> None:
    gated = Gated()
    saver = _saver(storage=gated)
    saver.save(tmp_path, "t", _content(1.0))
    saver._memory._finish_making()
    nbytes = saver._memory.nbytes
    larger = [Piece.whole("module/w", torch.ones(2_000_000))]
    saver.at_boundary(lambda: larger)
    saver._memory._finish_making()
    assert saver._memory.nbytes == nbytes
    gated.gate.set()
    saver.wait()
    saver.at_boundary(lambda: larger)
    saver._memory._finish_making()
    assert saver._memory.nbytes > nbytes
    saver.close()


def test_whoever_was_interrupted_while_it_waited_for_the_copy_waits_again(tmp_path: Path) -> None:
    gate, copied = threading.Event(), snapshots._copy_private

    def late(*moves: Any) -> None:
        assert gate.wait(30)
        copied(*moves)

    saver = _saver()
    moment = torch.full((5,), 1.0)
    pieces = [Piece("optimizer/w/exp_avg", (5,), 0, moment, is_private=True)]
    with mock.patch.object(snapshots, "_copy_private", late):
        started = saver.save(tmp_path, "t", Content(pieces, dict, dict, dict))
        with mock.patch.object(started, "wait_for_copy", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            saver.before_change()
        threading.Timer(0.2, gate.set).start()
        saver.before_change()
        moment.fill_(2.0)
        saver.close()
    assert open_checkpoint(tmp_path).read("optimizer/w/exp_avg").tolist() == [1.0] * 5


def test_a_save_over_the_limit_is_made_in_the_foreground(tmp_path: Path) -> None:
    saver = _saver(SavePlan(is_background=True, limit_nbytes=10))
    saver.save(tmp_path, "t", _content(1.0))
    assert not saver.is_writing
    assert open_checkpoint(tmp_path).read("module/w").tolist() == [1.0] * 5


def test_the_rules_of_retention_are_applied_behind_training(tmp_path: Path) -> None:
    saver = _saver(keep_last=1)
    for tag in ("one", "two"):
        saver.save(tmp_path, tag, _content(1.0))
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "two"]


def test_a_writer_that_writes_nothing_removes_nothing(tmp_path: Path) -> None:
    real = _saver(SavePlan())
    for tag in ("a", "b"):
        real.save(tmp_path, tag, _content(1.0))
    mock = _saver(SavePlan(), MockStorage(), keep_last=1)
    mock.save(tmp_path, "b", _content(2.0))
    assert list_tags(tmp_path) == ["a", "b"]
    assert open_checkpoint(tmp_path, "b").read("module/w").tolist() == [1.0] * 5


def test_scripts_are_left_where_the_plan_says_so(tmp_path: Path) -> None:
    saver = _saver(SavePlan(leaves_scripts=True))
    saver.save(tmp_path, "t", _content(1.0))
    assert (tmp_path / "zero_to_fp32.py").is_file()


def test_statistics_tell_bytes_seconds_and_speed() -> None:
    line = statistics(Committed(Path("/ck/t"), 3_000_000_000), 2.0, 0.25)
    assert line == "saved /ck/t: 3.000 GB in 2.000 s, 1.500 GB/s, training waited 0.250 s of it"
    assert statistics(Committed(Path("/ck/t"), 10**9), 2.0, None) == "saved /ck/t: 1.000 GB in 2.000 s, 0.500 GB/s"
