from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed.checkpoint.disk.folders import claim, clean, find_folder, point_latest, settle, swap_in, working_folder
from deepspeed.checkpoint.disk.storage import Lock, Storage
from deepspeed.errors import CheckpointError
from tests.unit.checkpoint.faulty_storage import NoExchange, Refusing

_TOKEN = "0123456789abcdef"


def _folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for file in ("manifest.json", *files):
        (path / file).write_text(str(path.name))
    return path


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def _replace(tmp_path: Path, storage: Storage) -> Path:
    final = tmp_path / "t"
    working = _folder(working_folder(final, _TOKEN), "rank_00000.safetensors")
    settle(swap_in(working, final, _TOKEN, storage), final, storage)
    return final


def test_a_new_tag_is_one_rename(tmp_path: Path) -> None:
    final = _replace(tmp_path, Storage())
    assert _names(tmp_path) == ["t"]
    assert _names(final) == ["manifest.json", "rank_00000.safetensors"]


@pytest.mark.parametrize("storage", [Storage(), NoExchange()], ids=["exchange", "two renames"])
def test_an_existing_tag_is_replaced_and_the_users_own_files_stay(tmp_path: Path, storage: Storage) -> None:
    _folder(tmp_path / "t", "rank_00000.safetensors", "rank_00001.safetensors", "notes.txt")
    (tmp_path / "t" / "plots").mkdir()
    final = _replace(tmp_path, storage)
    assert _names(tmp_path) == ["t"]
    assert _names(final) == ["manifest.json", "notes.txt", "plots", "rank_00000.safetensors"]
    assert (final / "manifest.json").read_text() == f".t.writing-{_TOKEN}"
    assert (final / "notes.txt").read_text() == "t"


@pytest.mark.parametrize("storage", [Storage(), NoExchange()], ids=["exchange", "two renames"])
def test_a_link_of_that_name_is_replaced_and_its_target_kept(tmp_path: Path, storage: Storage) -> None:
    _folder(tmp_path / "elsewhere", "notes.txt")
    (tmp_path / "t").symlink_to(tmp_path / "elsewhere")
    final = _replace(tmp_path, storage)
    assert not final.is_symlink()
    assert _names(tmp_path) == ["elsewhere", "t"]
    assert _names(tmp_path / "elsewhere") == ["manifest.json", "notes.txt"]


def test_a_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        _replace(tmp_path, Storage())
    assert (tmp_path / "t").read_text() == "mine"


def test_a_refused_second_rename_puts_the_old_folder_back(tmp_path: Path) -> None:
    class _Storage(Refusing):
        def exchange(self, one: Path, other: Path) -> bool:
            return False

    _folder(tmp_path / "t", "old")
    with pytest.raises(OSError, match="t"):
        _replace(tmp_path, _Storage(lambda name, path: name == "rename" and "writing" in path.name))
    assert _names(tmp_path / "t") == ["manifest.json", "old"]


def test_an_old_folder_that_cannot_be_removed_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _folder(tmp_path / "t", "rank_00000.safetensors")
    final = _replace(tmp_path, Refusing(lambda name, path: name == "remove"))
    assert (final / "manifest.json").read_text() == f".t.writing-{_TOKEN}"
    assert "the old one could not be removed" in caplog.text


def test_left_over_folders_are_removed(tmp_path: Path) -> None:
    _folder(tmp_path / f".t.writing-{_TOKEN}", "rank_00000.safetensors")
    _folder(tmp_path / f".other.writing-{_TOKEN}")
    (tmp_path / f".latest.writing-{_TOKEN}").write_text("t")
    _folder(tmp_path / "t")
    clean(tmp_path, Storage())
    assert _names(tmp_path) == ["t"]


def test_other_hidden_things_are_not_ours_to_remove(tmp_path: Path) -> None:
    for name in (".git", ".t.writing-short", ".t.backup-0123456789abcdef", "t.writing-0123456789abcdef"):
        (tmp_path / name).mkdir()
    clean(tmp_path, Storage())
    assert len(_names(tmp_path)) == 4


def test_a_folder_that_a_live_save_works_in_is_left_alone(tmp_path: Path) -> None:
    storage = Storage()
    working = _folder(tmp_path / f".t.writing-{_TOKEN}")
    lock = storage.lock(working)
    assert lock is not None
    clean(tmp_path, storage)
    assert working.exists()
    lock.release()
    clean(tmp_path, storage)
    assert not working.exists()


def test_the_users_files_in_a_left_over_are_brought_back(tmp_path: Path) -> None:
    """A kill after the exchange leaves the old folder, with the user's files in it, under the working name."""
    _folder(tmp_path / "t", "kept.txt")
    _folder(tmp_path / f".t.writing-{_TOKEN}", "notes.txt", "kept.txt")
    clean(tmp_path, Storage())
    assert _names(tmp_path) == ["t"]
    assert (tmp_path / "t" / "kept.txt").read_text() == "t"
    assert (tmp_path / "t" / "notes.txt").read_text() == f".t.writing-{_TOKEN}"


def test_a_set_aside_folder_is_read_and_then_put_back(tmp_path: Path) -> None:
    aside = _folder(tmp_path / f".t.replaced-{_TOKEN}", "old")
    assert find_folder(tmp_path / "t") == aside
    clean(tmp_path, Storage())
    assert find_folder(tmp_path / "t") == tmp_path / "t"
    assert _names(tmp_path / "t") == ["manifest.json", "old"]


def test_a_folder_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    _folder(tmp_path / f".t.replaced-{_TOKEN}")
    _folder(tmp_path / "t")
    assert find_folder(tmp_path / "t") == tmp_path / "t"
    assert find_folder(tmp_path / "u") is None
    assert find_folder(tmp_path / "nowhere" / "u") is None


def test_what_cannot_be_cleaned_up_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _folder(tmp_path / f".t.writing-{_TOKEN}")
    clean(tmp_path, Refusing(lambda name, path: name == "remove"))
    assert "Remove it by hand" in caplog.text


def test_latest_is_replaced_in_one_step(tmp_path: Path) -> None:
    point_latest(tmp_path, "one", _TOKEN, Storage())
    point_latest(tmp_path, "two", _TOKEN, Storage())
    assert (tmp_path / "latest").read_bytes() == b"two"
    assert _names(tmp_path) == ["latest"]


class _AnotherJob(Storage):
    """Does `meanwhile` just before the first call of `operation`, as another job may."""

    def __init__(self, operation: str, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._operation, self._meanwhile = operation, meanwhile

    def _look(self, operation: str) -> None:
        if operation == self._operation:
            self._operation = ""
            self._meanwhile()

    def rename(self, source: Path, target: Path) -> None:
        self._look("rename")
        super().rename(source, target)

    def lock(self, path: Path) -> Lock | None:
        self._look("lock")
        return super().lock(path)


def test_a_new_latest_that_another_job_takes_for_a_left_over_is_written_again(tmp_path: Path) -> None:
    point_latest(tmp_path, "one", _TOKEN, _AnotherJob("rename", lambda: clean(tmp_path, Storage())))
    assert (tmp_path / "latest").read_text() == "one"
    assert _names(tmp_path) == ["latest"]


def test_a_folder_that_another_job_takes_for_a_left_over_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    working, lock = claim(tmp_path / "t", _AnotherJob("lock", lambda: clean(tmp_path, Storage())))
    clean(tmp_path, Storage())
    assert _names(tmp_path) == [working.name]
    lock.release()
    clean(tmp_path, Storage())
    assert _names(tmp_path) == []


def test_a_tag_that_another_job_makes_just_now_is_replaced(tmp_path: Path) -> None:
    final = _replace(tmp_path, _AnotherJob("rename", lambda: _folder(tmp_path / "t", "notes.txt")))
    assert (final / "manifest.json").read_text() == f".t.writing-{_TOKEN}"
    assert _names(tmp_path) == ["t"]


def test_between_the_two_renames_no_other_job_puts_the_old_folder_back(tmp_path: Path) -> None:
    _folder(tmp_path / "t", "rank_00000.safetensors")

    class _Two(NoExchange):
        def rename(self, source: Path, target: Path) -> None:
            if "writing" in source.name:
                clean(tmp_path, Storage())
            super().rename(source, target)

    storage = _Two()
    working, lock = claim(tmp_path / "t", storage)
    settle(swap_in(working, tmp_path / "t", _TOKEN, storage), tmp_path / "t", storage)
    lock.release()
    assert _names(tmp_path) == ["t"]
    assert _names(tmp_path / "t") == []
