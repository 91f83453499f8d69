from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.output import LogFile, LogFolderError, finish, free_note, last_lines, log_paths


def test_the_last_lines_are_those_that_say_something() -> None:
    assert last_lines(b"a\n\nb\nc\n\n", 2) == "b\nc"
    assert last_lines(b"") == ""
    assert last_lines("caf\u00e9 \u2713\n".encode()) == "caf\u00e9 \u2713"


def test_of_a_progress_bar_only_its_last_state_is_kept() -> None:
    assert last_lines(b"10%\r20%\r30%\nTraceback\r\nboom") == "30%\nTraceback\nboom"


@given(st.binary(max_size=200), st.integers(1, 5))
def test_any_bytes_give_at_most_so_many_lines(written: bytes, count: int) -> None:
    assert last_lines(written, count).count("\n") < count


def test_log_files_are_named_by_time_and_rank(tmp_path: Path) -> None:
    now = datetime.datetime(2024, 5, 6, 7, 8, 9)
    paths = log_paths(tmp_path / "a" / "logs", [2, 3], now)
    assert [path.name for path in paths] == ["20240506070809_rank2.log", "20240506070809_rank3.log"]
    assert paths[0].parent.is_dir()


def test_a_file_in_place_of_the_log_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(LogFolderError, match="--enable_each_rank_log") as caught:
        log_paths(tmp_path / "logs", [0], datetime.datetime(2024, 1, 1))
    assert isinstance(caught.value, ValueError)


def test_a_log_file_holds_both_streams_and_gives_its_tail(tmp_path: Path) -> None:
    output = LogFile(tmp_path / "r.log")
    stdout, stderr = output.streams()
    subprocess.run(["sh", "-c", "echo one; echo two >&2"], stdout=stdout, stderr=stderr, check=True)
    output.started()
    finish([output], time.sleep)
    assert output.tail() == "one\ntwo"
    assert (tmp_path / "r.log").read_text() == "one\ntwo\n"


# PassedOn writes to descriptors 1 and 2, which pytest owns here: it is tried in a process of its own.
_PASS_ON = """
import subprocess, sys, time
from deepspeed.launcher.output import PassedOn, finish
output = PassedOn()
stdout, stderr = output.streams()
process = subprocess.Popen(sys.argv[1:], stdout=stdout, stderr=stderr)
output.started()
process.wait()
finish([output], time.sleep)
tail = output.tail()
open(TAIL, "w").write(tail)
"""


@pytest.fixture
def tail_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def _pass_on(
    tail_pipe: tuple[int, int], command: list[str], **streams: int
) -> tuple[subprocess.CompletedProcess[bytes], str]:
    reader, writer = tail_pipe
    code = _PASS_ON.replace("TAIL", str(writer))
    done = subprocess.run([sys.executable, "-c", code, *command], pass_fds=(writer,), check=True, **streams)
    os.close(writer)
    return done, os.read(reader, 65536).decode()


def test_streams_that_are_apart_stay_apart(tail_pipe: tuple[int, int]) -> None:
    done, tail = _pass_on(tail_pipe, ["sh", "-c", "echo out; echo err >&2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.stdout, done.stderr, tail) == (b"out\n", b"err\n", "out\nerr")


def test_streams_that_are_one_keep_the_order_of_lines(tail_pipe: tuple[int, int]) -> None:
    loop = "for i in 1 2 3 4 5; do echo out$i; echo err$i >&2; done"
    done, tail = _pass_on(tail_pipe, ["sh", "-c", loop], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    expected = "\n".join(f"{name}{i}" for i in range(1, 6) for name in ("out", "err"))
    assert (done.stdout.decode(), tail) == (expected + "\n", expected)


def test_more_than_a_pipe_holds_is_passed_on_whole(tail_pipe: tuple[int, int]) -> None:
    code = "import sys; sys.stdout.write('0123456789' * 100000)"
    done, tail = _pass_on(tail_pipe, [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.stdout == b"0123456789" * 100000
    assert len(tail) == 16384


_OUTLIVED = """
import os, subprocess, sys, threading, time
from deepspeed.launcher import output as module
{patch}
output = module.PassedOn()
stdout, stderr = output.streams()
process = subprocess.Popen(["sh", "-c", "echo last words"], stdout=stdout, stderr=stderr)
held = os.dup(stdout) if {is_held} else None
output.started()
process.wait()
began = time.monotonic()
module.finish([output], time.sleep)
print(f"{{time.monotonic() - began:.1f}} {{output.tail()}}", file=open("told", "w"))
"""


def test_a_pump_that_is_late_by_seconds_still_passes_everything_on(tmp_path: Path) -> None:
    patch = "real = os.read; module.os.read = lambda fd, count: (time.sleep(1.5), real(fd, count))[1]"
    code = _OUTLIVED.format(patch=patch, is_held=False)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"last words\n"
    assert (tmp_path / "told").read_text().split(maxsplit=1)[1] == "last words\n"


def test_a_stream_that_an_outsider_holds_open_is_not_waited_for(tmp_path: Path) -> None:
    code = _OUTLIVED.format(patch="", is_held=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, check=True, timeout=30)
    assert done.stdout == b"last words\n"


def test_a_reader_of_ours_that_takes_nothing_is_waited_for_in_vain_for_a_moment_only(tmp_path: Path) -> None:
    code = _OUTLIVED.format(patch="module._STUCK_SECONDS = 0.5", is_held=False)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=writer)
    os.close(writer)
    assert process.wait(30) == 0
    os.close(reader)
    assert (tmp_path / "told").read_text().split(maxsplit=1)[1] == "last words\n"


def test_a_stream_that_somebody_made_non_blocking_loses_nothing(tail_pipe: tuple[int, int]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    code = _PASS_ON.replace("TAIL", str(tail_pipe[1]))
    write = "import sys; sys.stdout.write('0123456789' * 100000)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, sys.executable, "-c", write], stdout=writer, stderr=writer, pass_fds=(tail_pipe[1],)
    )
    os.close(writer)
    os.close(tail_pipe[1])
    with open(reader, "rb") as taken:
        assert taken.read() == b"0123456789" * 100000
    assert process.wait(30) == 0


def test_a_log_file_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "r.log").mkdir()
    with pytest.raises(LogFolderError, match=r"r\.log: Is a directory; give a writable folder"):
        LogFile(tmp_path / "r.log")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_note(tmp_path) == ""
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 100, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    assert free_note(tmp_path) == "; its disk is full"
