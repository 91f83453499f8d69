"""Folders of a tier: own ones, abandoned ones, other people's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.errors import FileIoError
from deepspeed.offload.swap_folder import SwapFolder

_CLAIM_AND_WAIT = """
import sys, pathlib
from deepspeed.offload.swap_folder import SwapFolder
folder = SwapFolder.claim(pathlib.Path(sys.argv[1]), "rank0")
(folder.path / "state").write_bytes(b"x" * 4096)
print(folder.path, flush=True)
sys.stdin.read()
"""


def _start(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _CLAIM_AND_WAIT, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_made_and_removed(tmp_path: Path) -> None:
    parent = tmp_path / "not" / "there" / "yet"
    folder = SwapFolder.claim(parent, "rank0")
    (folder.path / "state").write_bytes(b"1")
    assert folder.path.parent == parent
    folder.close()
    folder.close()
    assert list(parent.iterdir()) == []


def test_a_relative_path_means_the_folder_of_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = SwapFolder.claim(Path("tier"), "rank0")
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder.close()
    assert list((tmp_path / "tier").iterdir()) == []


def test_the_home_folder_may_be_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = SwapFolder.claim(Path("~/tier"), "rank0")
    assert folder.path.parent == tmp_path / "tier"
    folder.close()


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    process, abandoned = _start(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert (abandoned / "state").exists()  # a kill leaves it
    folder = SwapFolder.claim(tmp_path, "rank0")
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.close()


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    process, theirs = _start(tmp_path)
    try:
        ours = SwapFolder.claim(tmp_path, "rank0")
        also_ours = SwapFolder.claim(tmp_path, "rank0")
        assert sorted(tmp_path.iterdir()) == sorted([theirs, ours.path, also_ours.path])
        assert (theirs / "state").exists()
        ours.close()
        also_ours.close()
    finally:
        process.communicate("", timeout=10)
    assert list(tmp_path.iterdir()) == []  # removed at exit


def test_folders_of_other_hosts_and_other_people_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "deepspeed-tier-elsewhere-1-rank0-00", tmp_path / "data"]
    for other in others:
        other.mkdir()
    SwapFolder.claim(tmp_path, "rank0").close()
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_forked_process_that_ends_does_not_remove_it(tmp_path: Path) -> None:
    folder = SwapFolder.claim(tmp_path, "rank0")
    pid = os.fork()
    if pid == 0:
        folder.close()  # what its exit would do
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()


def test_a_place_where_no_folder_can_be_is_refused(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FileIoError, match=r"nvme_path = .*file.*Give a directory on a local disk"):
        SwapFolder.claim(blocked, "rank0")
