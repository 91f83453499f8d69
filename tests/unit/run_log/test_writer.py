"""The file of a rank: appended, whole lines, no reason to end a run."""

from __future__ import annotations

import errno
import gc
import json
import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed.errors import ArgumentError
from deepspeed.run_log import End, RunLogWriter, engine_folder, file_name, free_engine


def _read(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file_name(rank)).read_text().splitlines()]


def test_a_record_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path / "new" / "run", 3, clock_seconds=lambda: 2.5)
    writer.write(End(1, "done"))
    assert writer.path.name == "rank-00003.jsonl"
    assert _read(tmp_path / "new" / "run", 3) == [{"kind": "end", "time": 2.5, "step": 1, "cause": "done"}]
    writer.close()
    writer.write(End(2, "done"))  # nothing once closed
    writer.close()
    assert len(_read(tmp_path / "new" / "run", 3)) == 1


def test_a_second_run_appends_even_after_a_line_that_was_cut(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = RunLogWriter(tmp_path, 0)
        writer.write(End(step, "done"))
        writer.close()
    path = tmp_path / file_name(0)
    path.write_text(path.read_text()[:-9])  # killed in the middle of a line
    writer = RunLogWriter(tmp_path, 0)
    writer.write(End(3, "done"))
    writer.close()
    lines = path.read_text().splitlines()
    assert [len(lines), json.loads(lines[0])["step"], json.loads(lines[2])["step"]] == [3, 1, 3]
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines[1])


def test_a_folder_that_cannot_be_made_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"run_log: .*rank-00000.jsonl cannot be opened .*run_log.output_path"):
        RunLogWriter(tmp_path / "file", 0)


class _Full:
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        pass


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RunLogWriter(tmp_path, 0)
    assert writer._file is not None
    writer._file.close()
    writer._file = _Full()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        writer.write(End(1, "done"))
        writer.write(End(2, "done"))
    (line,) = caplog.messages
    assert "takes no more records (No space left on device)" in line


class _Counted:
    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def write(self, data: memoryview) -> int:
        self.calls.append(bytes(data))
        return len(data)

    def close(self) -> None:
        pass


def test_records_of_one_moment_are_one_system_call_and_a_line_each(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path, 0)
    assert writer._file is not None
    writer._file.close()
    writer._file = counted = _Counted()  # type: ignore[assignment]
    writer.write(End(1, "done"), End(2, "done"))
    (data,) = counted.calls
    assert [json.loads(line)["step"] for line in data.splitlines()] == [1, 2]
    assert data.endswith(b"\n")
    writer.close()


def test_engines_that_are_there_at_the_same_time_have_a_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("run")  # and the same place by another name
    writers = []
    for number in (1, 2, 3):
        assert free_engine(folder, 0) == free_engine(tmp_path / "run", 0) == number
        writers.append(RunLogWriter(engine_folder(folder, number), 0))
    assert [writer.path.parent for writer in writers] == [tmp_path / "run" / each for each in ("", "engine-2", "engine-3")]
    assert free_engine(folder, 1) == free_engine(Path("other"), 0) == 1  # another rank, another run
    writers[1].close()
    assert free_engine(folder, 0) == 2
    writers[0].close()
    writers[2].close()
    assert free_engine(folder, 0) == 1


def test_a_writer_that_is_gone_leaves_its_number_free(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path, 0)
    assert free_engine(tmp_path, 0) == 2
    del writer
    gc.collect()
    assert free_engine(tmp_path, 0) == 1


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    writer = RunLogWriter(tmp_path, 0)
    child = multiprocessing.get_context("fork").Process(target=writer.write, args=(End(1, "the child's"),))
    child.start()
    child.join()
    assert child.exitcode == 0
    writer.write(End(2, "done"))
    writer.close()
    assert [record["cause"] for record in _read(tmp_path)] == ["done"]
