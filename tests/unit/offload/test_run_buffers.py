"""Runs through buffers: the right bytes in memory and on the disk, whatever overlaps; and what happens when a disk fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.errors import FileIoError
from deepspeed.offload.run_buffers import Move, RunBuffers
from deepspeed.ops.aio.engine import IoEngine, IoFile, IoRequest

_RUN_NBYTES = 4096


@pytest.fixture
def io() -> Iterator[IoEngine]:
    with IoEngine() as engine:
        yield engine


class _Runs:
    """`runs` runs of one page each, in one file that begins as the runs' numbers."""

    def __init__(self, io: IoEngine, folder: Path, runs: int, count: int, *, ahead: bool, behind: bool) -> None:
        self.path = folder / "runs"
        self.path.write_bytes(b"".join(bytes([run]) * _RUN_NBYTES for run in range(runs)))
        self.file = io.open(self.path)
        self.read: list[int] = []
        self.written: list[int] = []
        self.runs = runs
        self.buffers = RunBuffers(
            io, runs, count, _RUN_NBYTES, reads=self._reads, writes=self._writes, is_read_ahead=ahead, is_write_behind=behind
        )

    def _reads(self, run: int) -> list[Move]:
        self.read.append(run)
        return [Move(self.file, run * _RUN_NBYTES, 0, _RUN_NBYTES)]

    def _writes(self, run: int) -> list[Move]:
        self.written.append(run)
        half = _RUN_NBYTES // 2
        return [Move(self.file, run * _RUN_NBYTES + part, part, half) for part in (0, half)]

    def step_all(self) -> list[int]:
        """Add 1 to every byte; gives the order."""
        order = []
        for run, memory in self.buffers.walk():
            order.append(run)
            memory.add_(1)
        return order

    def contents(self) -> list[set[int]]:
        self.buffers.settle()
        raw = self.path.read_bytes()
        return [set(raw[run * _RUN_NBYTES : (run + 1) * _RUN_NBYTES]) for run in range(self.runs)]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=st.integers(1, 9), count=st.integers(1, 5), ahead=st.booleans(), behind=st.booleans(), walks=st.integers(1, 4))
def test_every_run_is_stepped_once_per_walk(
    io: IoEngine, tmp_path: Path, runs: int, count: int, ahead: bool, behind: bool, walks: int
) -> None:
    made = _Runs(io, tmp_path, runs, count, ahead=ahead, behind=behind)
    for _ in range(walks):
        assert sorted(made.step_all()) == list(range(runs))
    assert made.contents() == [{run + walks} for run in range(runs)]
    assert made.buffers.nbytes <= count * _RUN_NBYTES
    made.file.close()


def test_a_walk_begins_with_what_the_last_one_left_in_memory(io: IoEngine, tmp_path: Path) -> None:
    made = _Runs(io, tmp_path, runs=6, count=3, ahead=False, behind=True)
    assert made.step_all() == [0, 1, 2, 3, 4, 5]
    assert made.read == [0, 1, 2, 3, 4, 5]
    made.read.clear()
    assert made.step_all() == [5, 4, 3, 2, 1, 0]
    assert made.read == [2, 1, 0]  # 5, 4, 3 were there
    assert made.written == [0, 1, 2, 5, 4, 3]  # what stays is written when somebody looks
    assert made.contents() == [{run + 2} for run in range(6)]
    assert sorted(made.written[6:]) == [0, 1, 2]


def test_reads_go_ahead_as_far_as_there_are_buffers(io: IoEngine, tmp_path: Path) -> None:
    made = _Runs(io, tmp_path, runs=6, count=3, ahead=True, behind=False)
    walk = made.buffers.walk()
    assert next(walk)[0] == 0
    assert made.read == [0, 1, 2]
    next(walk)
    assert made.read == [0, 1, 2, 3]  # 0 was written, so its buffer is free
    assert [run for run, _ in walk] == [2, 3, 4, 5]


def test_what_fits_into_the_buffers_is_read_once_and_written_when_somebody_looks(io: IoEngine, tmp_path: Path) -> None:
    made = _Runs(io, tmp_path, runs=3, count=3, ahead=True, behind=True)
    for _ in range(3):
        made.step_all()
    assert made.read == [0, 1, 2]
    assert made.written == []
    made.buffers.settle(lambda run: run == 1)
    assert made.written == [1]
    assert made.contents() == [{3}, {4}, {5}]
    assert sorted(made.written) == [0, 1, 2]  # none of them twice


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.integers(1, 7),
    count=st.integers(1, 5),
    ahead=st.booleans(),
    behind=st.booleans(),
    edited=st.lists(st.integers(0, 6), max_size=4),
)
def test_walks_find_runs_that_were_edited_between_them(
    io: IoEngine, tmp_path: Path, runs: int, count: int, ahead: bool, behind: bool, edited: list[int]
) -> None:
    made = _Runs(io, tmp_path, runs, count, ahead=ahead, behind=behind)
    wanted = list(range(runs))
    for edit in [run % runs for run in (*edited, 0)]:
        made.step_all()
        wanted = [value + 1 for value in wanted]
        made.buffers.settle(lambda run, edit=edit: run == edit)
        io.write(made.file, edit * _RUN_NBYTES, torch.full((_RUN_NBYTES,), 50, dtype=torch.uint8)).wait()
        made.buffers.forget(lambda run, edit=edit: run == edit)
        wanted[edit] = 50
    made.step_all()
    assert made.contents() == [{value + 1} for value in wanted]
    made.file.close()


def test_an_edit_from_outside_is_seen_by_the_next_walk(io: IoEngine, tmp_path: Path) -> None:
    made = _Runs(io, tmp_path, runs=2, count=2, ahead=True, behind=True)
    made.step_all()
    made.buffers.settle()
    with made.path.open("r+b") as file:
        file.write(bytes([100]) * _RUN_NBYTES)
    made.buffers.forget()
    made.step_all()
    assert made.contents() == [{101}, {3}]


class _FailsOnWait(IoRequest):
    """A request that the disk refuses."""

    def wait(self) -> None:
        super().wait()
        raise FileIoError(errno.EIO, f"cannot write {self.file.path}: Input/output error.")


def _fail_writes_of(io: IoEngine, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    write = io.write

    def failing(file: IoFile, at: int, of: torch.Tensor) -> IoRequest:
        request = write(file, at, of)
        if at == offset:
            request.__class__ = _FailsOnWait
        return request

    monkeypatch.setattr(io, "write", failing)


@pytest.mark.parametrize("behind", [False, True])
def test_a_write_that_fails_surfaces_once_and_later_walks_work(
    io: IoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    made = _Runs(io, tmp_path, runs=5, count=2, ahead=True, behind=behind)
    with monkeypatch.context() as patch:
        _fail_writes_of(io, patch, offset=_RUN_NBYTES)
        with pytest.raises(FileIoError, match="runs: Input/output error"):
            made.step_all()
    made.buffers.settle()  # nothing is under way, and the error was told
    assert sorted(made.step_all()) == [0, 1, 2, 3, 4]


def test_a_write_that_fails_between_walks_loses_nothing(
    io: IoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _Runs(io, tmp_path, runs=3, count=3, ahead=True, behind=True)
    made.step_all()
    with monkeypatch.context() as patch:
        _fail_writes_of(io, patch, offset=_RUN_NBYTES)
        with pytest.raises(FileIoError, match="runs: Input/output error"):
            made.buffers.settle()
    made.step_all()
    assert made.contents() == [{2}, {3}, {4}]


def test_a_walk_that_is_left_early_forgets_what_was_in_memory(io: IoEngine, tmp_path: Path) -> None:
    made = _Runs(io, tmp_path, runs=3, count=3, ahead=False, behind=True)
    walk = made.buffers.walk()
    next(walk)[1].fill_(77)  # never written: the step failed
    walk.close()
    made.step_all()
    assert made.contents() == [{1}, {2}, {3}]
