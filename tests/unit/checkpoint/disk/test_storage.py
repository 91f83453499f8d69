from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading
from pathlib import Path

import pytest
import xxhash

from deepspeed.checkpoint.disk.manifest import FileEntry
from deepspeed.checkpoint.disk.storage import Storage, WriteOptions


def test_a_written_file_is_described_by_its_bytes(tmp_path: Path) -> None:
    with Storage().create(tmp_path / "f") as file:
        file.write(memoryview(b"one"))
        file.write(memoryview(b""))
        file.write(memoryview(b"two"))
        entry = file.finish()
    assert (tmp_path / "f").read_bytes() == b"onetwo"
    assert entry == FileEntry(nbytes=6, blocks=[xxhash.xxh3_64_hexdigest(b"onetwo")])


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


_SMALL = WriteOptions(block_nbytes=4096, block_count=2)


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("block_count", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 3 * 4096, 50_001])
def test_every_way_to_the_disk_writes_the_same_bytes(tmp_path: Path, nbytes: int, block_count: int, is_direct: bool) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    storage = Storage(WriteOptions(4096, block_count, is_direct))
    with storage.create(tmp_path / "f") as file:
        for start in range(0, nbytes, 1500):
            file.write(memoryview(data)[start : start + 1500])
        entry = file.finish()
    assert (tmp_path / "f").read_bytes() == data
    assert entry == FileEntry(nbytes=nbytes, blocks=[xxhash.xxh3_64_hexdigest(data)] if nbytes else [])
    assert storage.written.nbytes == nbytes


def test_what_was_handed_over_may_change_at_once(tmp_path: Path) -> None:
    data = bytearray(10_000)
    with Storage(_SMALL).create(tmp_path / "f") as file:
        for number in range(8):
            data[:] = bytes([number]) * len(data)
            file.write(memoryview(data))
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"".join(bytes([number]) * 10_000 for number in range(8))


def test_blocks_of_an_odd_size_are_rounded_up_to_pages(tmp_path: Path) -> None:
    assert WriteOptions(block_nbytes=1).aligned_block_nbytes == mmap.PAGESIZE
    with Storage(WriteOptions(block_nbytes=5000)).create(tmp_path / "f") as file:
        file.write(memoryview(bytes(100_000)))
        assert file.finish().nbytes == (tmp_path / "f").stat().st_size == 100_000


def test_an_error_of_the_writing_thread_reaches_the_caller_and_ends_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "no space")

    threads = threading.active_count()
    with Storage(_SMALL).create(tmp_path / "f") as file:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space"):
            file.write(memoryview(bytes(4 * 4096)))
    assert threading.active_count() == threads


def test_an_error_of_the_last_block_is_raised_by_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: memoryview) -> int:
        raise OSError(errno.EIO, "broken disk")

    with Storage(_SMALL).create(tmp_path / "f") as file:
        monkeypatch.setattr(os, "write", broken)
        file.write(memoryview(bytes(4096)))
        with pytest.raises(OSError, match="broken disk"):
            file.finish()


def test_a_disk_that_refuses_direct_writes_is_written_the_usual_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def refuse_direct(fd: int, data: memoryview) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "unfit")
        return real(fd, data)

    with Storage(_SMALL).create(tmp_path / "f") as file:
        monkeypatch.setattr(os, "write", refuse_direct)
        file.write(memoryview(b"x" * 10_000))
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"x" * 10_000


def test_small_files_need_no_thread(tmp_path: Path) -> None:
    threads = threading.active_count()
    with Storage().create(tmp_path / "f") as file:
        file.write(memoryview(b"small"))
        assert threading.active_count() == threads
        file.finish()


def test_a_lock_is_given_free_although_a_forked_process_has_the_folder_open_too(tmp_path: Path) -> None:
    lock = Storage().lock(tmp_path)
    assert lock is not None
    theirs = os.dup(lock._fd)  # what a fork does to each open file
    try:
        assert Storage().lock(tmp_path) is None
        lock.release()
        again = Storage().lock(tmp_path)
        assert again is not None
        again.release()
    finally:
        os.close(theirs)
