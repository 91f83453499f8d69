from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher.pidfile import pid_file, pid_path


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_file_holds_our_process_id_while_the_job_runs() -> None:
    with pid_file(4711):
        assert pid_path(4711).name == "4711.ds"
        assert pid_path(4711).read_text() == str(os.getpid())
    assert not pid_path(4711).exists()


def test_the_file_is_removed_when_the_job_fails() -> None:
    with pytest.raises(ZeroDivisionError), pid_file(4711):
        raise ZeroDivisionError
    assert not pid_path(4711).exists()


def test_a_file_that_is_there_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "4711.ds").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("keep")
    with pytest.raises(LaunchError, match="is there already"), pid_file(4711):
        pass
    assert (tmp_path / "elsewhere").read_text() == "keep"


def test_no_file_is_written_unless_asked_for(tmp_path: Path) -> None:
    with pid_file(0):
        assert not list(tmp_path.iterdir())
