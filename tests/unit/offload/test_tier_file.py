"""Ranges of a tier's file: what is written is read, whatever was joined on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.errors import FileIoError
from deepspeed.offload import tier_file
from deepspeed.offload.tier_file import TierFile, read_new
from deepspeed.ops.aio.engine import IoEngine

_NBYTES = 40_000


@pytest.fixture
def io() -> Iterator[IoEngine]:
    with IoEngine() as engine:
        yield engine


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writes=st.lists(st.tuples(st.integers(0, _NBYTES - 1), st.integers(0, 9000), st.booleans()), max_size=12),
    window_nbytes=st.sampled_from([4096, 8192, 4 << 20]),
)
def test_what_is_written_is_read(
    io: IoEngine, tmp_path: Path, writes: list[tuple[int, int, bool]], window_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_file, "_WINDOW_NBYTES", window_nbytes)
    expected = torch.zeros(_NBYTES, dtype=torch.uint8)
    file = TierFile(io, tmp_path / "file", _NBYTES)
    generator = torch.Generator().manual_seed(0)
    end = 0
    for start, length, follows in writes:
        begin = (
            min(end + 64 - end % 64 if end % 64 else end, _NBYTES - 1) if follows else start
        )  # neighbours, as layouts have
        stop = min(begin + length, _NBYTES)
        data = torch.randint(0, 256, (stop - begin,), dtype=torch.uint8, generator=generator)
        expected[begin:stop] = data
        file.write(begin, data)
        end = stop
    assert torch.equal(read_new(file, 0, _NBYTES, torch.uint8), expected)
    file.close()


def test_neighbours_become_one_write(io: IoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = []
    write = io.write
    monkeypatch.setattr(io, "write", lambda file, offset, of: offsets.append((offset, of.nbytes)) or write(file, offset, of))
    file = TierFile(io, tmp_path / "file", 4096)
    for start in range(0, 4096, 64):
        file.write(start, torch.full((60,), start // 64, dtype=torch.uint8))  # 4 bytes of padding after each
    file.flush()
    assert offsets == [(0, 4096 - 4)]


def test_looks_from_outside_are_announced(io: IoEngine, tmp_path: Path) -> None:
    file = TierFile(io, tmp_path / "file", 4096)
    seen: list[tuple[str, int, int]] = []
    file.before_access = lambda start, stop: seen.append(("access", start, stop))
    file.after_write = lambda start, stop: seen.append(("changed", start, stop))
    file.write(128, torch.ones(8))
    assert torch.equal(read_new(file, 132, 3, torch.float32), torch.ones(3))
    assert seen == [("access", 65, 160), ("changed", 65, 160), ("access", 132, 144)]  # 63 bytes before may be a gap to fill


def test_a_file_that_became_shorter_is_an_error_that_names_it(io: IoEngine, tmp_path: Path) -> None:
    file = TierFile(io, tmp_path / "states", 8192)
    with (tmp_path / "states").open("r+b") as cut:
        cut.truncate(4096)
    with pytest.raises(FileIoError, match=r"states.*ends at byte 4096"):
        read_new(file, 0, 8192, torch.uint8)
