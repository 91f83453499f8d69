from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.errors import FileIoError
from deepspeed.offload import write_behind
from deepspeed.offload.write_behind import WriteBehind
from deepspeed.ops.aio.engine import IoEngine, IoFile

NUMEL = 20_000


@pytest.fixture
def io() -> Iterator[IoEngine]:
    with IoEngine() as engine:
        yield engine


def _content(file: IoFile, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(file.path.read_bytes()), dtype=dtype)


@settings(max_examples=25, deadline=None)
@given(ranges=st.lists(st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL)).map(sorted), max_size=12))
def test_the_file_holds_what_was_written_last_wherever_pieces_meet(
    ranges: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = torch.zeros(NUMEL, dtype=torch.bfloat16)
    with IoEngine() as io, io.open(tmp_path_factory.mktemp("w") / "file", 2 * NUMEL, create=True) as file:
        writes = WriteBehind(io, file)
        for number, (start, stop) in enumerate(ranges):
            values = torch.arange(stop - start, dtype=torch.float32) / 7 + number
            writes.write(2 * start, values, torch.bfloat16)
            expected[start:stop] = values.to(torch.bfloat16)
            values.fill_(float("nan"))  # the caller's memory may change at once
        writes.settle()
        assert torch.equal(_content(file, torch.bfloat16), expected)


def test_neighbours_are_joined_and_memory_is_bounded(io: IoEngine, tmp_path: Path) -> None:
    numel = 5 * (write_behind.WINDOW_NBYTES // 4)
    with io.open(tmp_path / "file", 4 * numel, create=True) as file:
        sent = []
        original = io.write
        io.write = lambda file, start, of: sent.append(of.nbytes) or original(file, start, of)  # type: ignore[method-assign]
        writes = WriteBehind(io, file)
        values = torch.arange(numel, dtype=torch.float32)
        for start in range(0, numel, 1000):
            writes.write(4 * start, values[start : start + 1000], torch.float32)
        most = writes.nbytes
        writes.settle()
        assert sent == [write_behind.WINDOW_NBYTES] * 5
        assert most == write_behind.WINDOWS * write_behind.WINDOW_NBYTES
        assert writes.nbytes == 0
        assert torch.equal(_content(file, torch.float32), values)


def test_an_error_is_settled_by_settle_and_once(io: IoEngine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 4096)
    file = io.open(path)
    writes = WriteBehind(io, file)
    writes.write(0, torch.ones(4), torch.float32)
    file.close()
    with pytest.raises(FileIoError, match="closed"):
        writes.settle()
    writes.close()
