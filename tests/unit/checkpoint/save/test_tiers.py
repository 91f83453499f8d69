from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint import list_tags, open_checkpoint
from deepspeed.checkpoint.disk.storage import HashedFile, Storage, WriteOptions
from deepspeed.checkpoint.save.copying import copy_checkpoint
from deepspeed.checkpoint.save.retention import KeepRules
from deepspeed.checkpoint.save.tiers import Keeper, PersistentTier, Saved, Tiers, choose_load_dir, load_places, tiers_of
from deepspeed.config.checkpoint import CheckpointConfig, NebulaConfig
from deepspeed.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError
from tests.unit.checkpoint.faulty_storage import FullDisk, killed_at
from tests.unit.checkpoint.tool_checkpoints import save


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class _Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class _Gate(Storage):
    """A disk that stands still until `opened`; `reached` says that a copy has come to it."""

    def __init__(self) -> None:
        super().__init__(WriteOptions(is_direct=False))
        self.reached, self.opened = threading.Event(), threading.Event()

    def create(self, path: Path) -> HashedFile:
        self.reached.set()
        assert self.opened.wait(30)
        return super().create(path)


def _save(folder: Path, tag: str, step: int = 1) -> Saved:
    save(folder, tag, {"master/w": torch.full((2, 3), float(step))}, global_steps=step)
    return Saved(folder, tag, is_latest=True)


def test_a_copy_is_the_checkpoint_byte_for_byte(tmp_path: Path) -> None:
    folder = save(tmp_path / "fast", "a")
    (folder / "mine.txt").write_text("mine")
    copied = copy_checkpoint(folder, tmp_path / "slow", "a", Storage(), save_latest=True)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "mine.txt"
    }
    assert open_checkpoint(tmp_path / "slow").tag == "a"


def test_a_damaged_file_is_not_copied_and_what_was_there_stays(tmp_path: Path) -> None:
    save(tmp_path / "slow", "a", global_steps=1)
    folder = save(tmp_path / "fast", "a", global_steps=2)
    path = folder / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointDamagedError, match=r"rank_00000\.safetensors differs"):
        copy_checkpoint(folder, tmp_path / "slow", "a", Storage(), save_latest=True)
    assert open_checkpoint(tmp_path / "slow").state["global_steps"] == 1
    assert sorted(path.name for path in (tmp_path / "slow").iterdir()) == ["a", "latest"]


def test_a_full_disk_is_settled_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = save(tmp_path / "fast", "a")
    with pytest.raises(CheckpointError, match="could not copy checkpoint 'a'"):
        copy_checkpoint(folder, tmp_path / "slow", "a", FullDisk(300), save_latest=True)
    assert list((tmp_path / "slow").iterdir()) == []


def test_a_kill_at_any_moment_of_a_copy_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    folder = save(tmp_path / "fast", "a", global_steps=2)
    steps = []
    for operation in range(0, 24, 2):
        slow = tmp_path / f"slow{operation}"
        save(slow, "a", global_steps=1)
        if (child := os.fork()) == 0:
            copy_checkpoint(folder, slow, "a", killed_at(operation), save_latest=True)
            os._exit(0)
        os.waitpid(child, 0)
        steps.append(open_checkpoint(slow).state["global_steps"])
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_a_checkpoint_is_copied_at_most_every_so_many_seconds(tmp_path: Path) -> None:
    clock = _Clock()
    tier = PersistentTier(tmp_path / "slow", 100, clock=clock)
    for seconds in (0, 40, 99, 100, 150, 205):
        clock.seconds = seconds
        tier.offer(_save(tmp_path / "fast", f"at{seconds}"))
        tier.wait()
    assert list_tags(tmp_path / "slow") == ["at0", "at100", "at205"]
    assert (tmp_path / "slow" / "latest").read_text() == "at205"


def test_training_does_not_wait_for_a_copy_and_of_those_due_meanwhile_the_newest_is_made(tmp_path: Path) -> None:
    clock, storage = _Clock(), _Gate()
    tier = PersistentTier(tmp_path / "slow", 1, storage, clock)
    for seconds in (0, 10, 20):
        clock.seconds = seconds
        tier.offer(_save(tmp_path / "fast", f"at{seconds}"))
        assert storage.reached.wait(30)
    assert tier.tags_in_use == {"at0", "at20"}
    storage.opened.set()
    tier.wait()
    assert list_tags(tmp_path / "slow") == ["at0", "at20"]
    assert tier.tags_in_use == set()


def test_the_fast_tier_keeps_a_checkpoint_while_it_is_being_copied(tmp_path: Path) -> None:
    storage = _Gate()
    tiers = Tiers(Keeper(KeepRules(last=1)), PersistentTier(tmp_path / "slow", 1000, storage))
    for step in (1, 2, 3):
        save(tmp_path / "fast", f"step{step}", global_steps=step)
        tiers.after_commit(tmp_path / "fast", f"step{step}")
    assert list_tags(tmp_path / "fast") == ["step1", "step3"]
    storage.opened.set()
    tiers.close()
    assert list_tags(tmp_path / "slow") == ["step1"]
    save(tmp_path / "fast", "step4", global_steps=4)
    tiers.after_commit(tmp_path / "fast", "step4")
    assert list_tags(tmp_path / "fast") == ["step4"]


def test_a_copy_that_fails_is_settled_once_and_the_next_is_made_at_once(tmp_path: Path) -> None:
    clock, storage = _Clock(), FullDisk(300)
    tiers = Tiers(Keeper(KeepRules()), PersistentTier(tmp_path / "slow", 1000, storage, clock))
    save(tmp_path / "fast", "a")
    tiers.after_commit(tmp_path / "fast", "a")
    with pytest.raises(CheckpointError, match=r"not copied to nebula\.persistent_storage_path"):
        tiers.close()
    tiers.before_save(tmp_path / "fast")
    storage.nbytes_left = 1 << 30
    save(tmp_path / "fast", "b")
    tiers.after_commit(tmp_path / "fast", "b")
    tiers.close()
    assert list_tags(tmp_path / "slow") == ["b"]


def test_a_checkpoint_that_is_saved_anew_during_its_copy_is_no_failure(tmp_path: Path) -> None:
    storage = _Gate()
    tier = PersistentTier(tmp_path / "slow", 1000, storage)
    tier.offer(_save(tmp_path / "fast", "a", 1))
    assert storage.reached.wait(30)
    again = _save(tmp_path / "fast", "a", 2)
    storage.opened.set()
    tier.wait()
    tier.offer(again)
    tier.wait()
    assert open_checkpoint(tmp_path / "slow", "a").state["global_steps"] == 2


def test_the_folder_that_is_saved_to_cannot_be_the_other_tier_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "fast")
    tiers = Tiers(Keeper(KeepRules(last=1)), PersistentTier(tmp_path / "link", 1000))
    tiers.before_save(tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"nebula.persistent_storage_path .*Give two different folders"):
        tiers.before_save(tmp_path / "fast")


def test_paths_in_the_block_are_those_of_the_moment_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nebula = NebulaConfig(enabled=True, persistent_storage_path="slow", nebula_load_path="older")
    tiers = tiers_of(CheckpointConfig(), nebula)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_places(nebula) == [tmp_path / "older", tmp_path / "slow"]
    assert tiers.persistent is not None
    tiers.persistent.offer(_save(tmp_path / "fast", "a"))
    tiers.close()
    assert list_tags(tmp_path / "slow") == ["a"]


def test_a_latest_that_cannot_be_read_removes_nothing_and_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in ("a", "b"):
        save(tmp_path, tag)
    (tmp_path / "latest").write_text("")
    Tiers(Keeper(KeepRules(last=1))).after_commit(tmp_path, "b")
    assert list_tags(tmp_path) == ["a", "b"]
    assert "latest is empty" in caplog.text


def test_a_load_looks_in_the_fast_tier_first_and_then_in_the_others(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    save(slow, "old")
    assert choose_load_dir(fast, None, [slow]) == slow
    save(fast, "new")
    assert choose_load_dir(fast, None, [slow]) == fast
    assert choose_load_dir(fast, "old", [slow]) == slow
    with pytest.raises(CheckpointNotFoundError, match=r"(?s)fast has no checkpoint 'none'.*slow has no checkpoint 'none'"):
        choose_load_dir(fast, "none", [slow])


def test_a_latest_of_the_fast_tier_that_names_nothing_leads_to_the_other(tmp_path: Path) -> None:
    save(tmp_path / "slow", "old")
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "latest").write_text("lost")
    assert choose_load_dir(tmp_path / "fast", None, [tmp_path / "slow"]) == tmp_path / "slow"
    (tmp_path / "fast" / "latest").write_text("")
    assert choose_load_dir(tmp_path / "fast", None, [tmp_path / "slow"]) == tmp_path / "slow"


def test_without_any_checkpoint_the_given_folder_is_the_answer(tmp_path: Path) -> None:
    assert choose_load_dir(tmp_path / "fast", None, [tmp_path / "slow"]) == tmp_path / "fast"
    assert choose_load_dir(tmp_path / "fast", "a", []) == tmp_path / "fast"


def test_the_blocks_say_what_is_kept_and_where_a_load_looks() -> None:
    assert tiers_of(CheckpointConfig(), NebulaConfig()).keeper.rules == KeepRules()
    assert tiers_of(CheckpointConfig(keep_last=3, keep_every=100), NebulaConfig()).keeper.rules == KeepRules(3, 100)
    nebula = NebulaConfig(enabled=True, persistent_storage_path="/slow", nebula_load_path="/older")
    assert tiers_of(CheckpointConfig(), nebula).keeper.rules == KeepRules(last=2)
    assert tiers_of(CheckpointConfig(keep_last=7), nebula).keeper.rules == KeepRules(last=7)
    assert tiers_of(CheckpointConfig(), nebula).persistent is not None
    assert tiers_of(CheckpointConfig(), NebulaConfig(enabled=True)).persistent is None
    assert load_places(nebula) == [Path("/older"), Path("/slow")]
    assert load_places(NebulaConfig(persistent_storage_path="/slow")) == []
    assert load_places(nebula.model_copy(update={"enable_nebula_load": False})) == []
