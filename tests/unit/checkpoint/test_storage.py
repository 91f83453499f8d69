from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import xxhash

from deepspeed.checkpoint.manifest import FileEntry
from deepspeed.checkpoint.storage import Storage


def test_a_written_file_is_described_by_its_bytes(tmp_path: Path) -> None:
    with Storage().create(tmp_path / "f") as file:
        file.write(memoryview(b"one"))
        file.write(memoryview(b""))
        file.write(memoryview(b"two"))
        entry = file.finish()
    assert (tmp_path / "f").read_bytes() == b"onetwo"
    assert entry == FileEntry(nbytes=6, xxh3_128=xxhash.xxh3_128_hexdigest(b"onetwo"))


def test_a_write_that_the_system_splits_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    Storage().write_file(tmp_path / "f", b"0123456789")
    monkeypatch.undo()
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        Storage().write_file(tmp_path / "f", b"other")
    assert (tmp_path / "f").read_text() == "mine"


def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert Storage().exchange(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["a"]


def test_exchange_with_nothing_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="a") as caught:
        Storage().exchange(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.ENOENT


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path: Path) -> None:
    storage = Storage()
    lock = storage.lock(tmp_path)
    assert lock is not None
    assert storage.lock(tmp_path) is None
    lock.release()
    again = storage.lock(tmp_path)
    assert again is not None
    again.release()


def test_a_lock_follows_its_folder_through_a_rename(tmp_path: Path) -> None:
    storage = Storage()
    (tmp_path / "a").mkdir()
    lock = storage.lock(tmp_path / "a")
    storage.rename(tmp_path / "a", tmp_path / "b")
    assert storage.lock(tmp_path / "b") is None
    assert lock is not None
    lock.release()


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "f").touch()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    Storage().remove(tmp_path / "link")
    assert (tmp_path / "data" / "f").exists()
    assert not (tmp_path / "link").is_symlink()
