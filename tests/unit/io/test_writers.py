from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.errors import ArgumentError, FileIoError, UsageError
from deepspeed.io import BaseFileWriter, FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter
from deepspeed.ops.aio.handle import AioHandle

PAGE = 4096


@pytest.fixture
def handle() -> Iterator[AioHandle]:
    with AioHandle(block_size=PAGE, queue_depth=2) as handle:
        yield handle


def config(handle: AioHandle, nbytes: int = 4 * PAGE, **changes: object) -> FastFileWriterConfig:
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    return FastFileWriterConfig(handle, buffer, **changes)  # type: ignore[arg-type]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 5 * PAGE), max_size=6),
    double_buffer=st.booleans(),
    flushes=st.sets(st.integers(0, 5)),
)
def test_a_fast_file_holds_exactly_what_was_written(
    handle: AioHandle, tmp_path: Path, lengths: list[int], double_buffer: bool, flushes: set[int]
) -> None:
    parts = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    with FastFileWriter(tmp_path / "file", config(handle, double_buffer=double_buffer)) as file:
        for number, part in enumerate(parts):
            assert file.write(part) == len(part)
            if number in flushes:
                file.flush()
                assert (tmp_path / "file").read_bytes() == b"".join(parts[: number + 1])
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert file.nbytes == sum(lengths)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("kind", ["fast", "python"])
def test_torch_saves_into_a_writer(handle: AioHandle, tmp_path: Path, kind: str, is_zip: bool) -> None:
    state = {"a": torch.randn(1000, 17), "b": torch.arange(5), "step": 3}
    path = tmp_path / "file"
    with FastFileWriter(path, config(handle)) if kind == "fast" else PyFileWriter(path) as file:
        torch.save(state, file, _use_new_zipfile_serialization=is_zip)
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["b"], state["b"])
    assert found["step"] == 3


def test_several_writers_make_one_file_and_an_older_one_leaves_nothing(handle: AioHandle, tmp_path: Path) -> None:
    path, data = tmp_path / "file", bytes(range(256)) * 300
    path.write_bytes(b"x" * 2 * len(data))
    writers = [
        FastFileWriter(path, config(handle, num_parallel_writers=3, writer_rank=rank, global_rank=rank)) for rank in range(3)
    ]
    for writer in writers:
        writer.write(data)
        writer.close()
    assert path.read_bytes() == data


def test_storages_are_written_with_their_lengths_before_them(handle: AioHandle, tmp_path: Path) -> None:
    tensor = torch.arange(10, dtype=torch.float32)
    typed = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=torch.float32, _internal=True)
    raw = torch.arange(5, dtype=torch.uint8).untyped_storage()
    expected = struct.pack("<q", 10) + tensor.numpy().tobytes() + struct.pack("<q", 5) + bytes(range(5))
    writers: list[BaseFileWriter] = [
        FastFileWriter(tmp_path / "fast", config(handle)),
        PyFileWriter(tmp_path / "python"),
        MockFileWriter(tmp_path / "mock"),
    ]
    for writer in writers:
        assert writer.save_torch_storage_object_list([typed, raw], save_size=True) == len(expected)
        writer.close()
    assert (tmp_path / "fast").read_bytes() == (tmp_path / "python").read_bytes() == expected
    with PyFileWriter(tmp_path / "bare") as bare:
        bare.save_torch_storage_object_list([raw, tensor[2:4]], save_size=False)
    assert (tmp_path / "bare").read_bytes() == bytes(range(5)) + tensor.numpy().tobytes()
    with MockFileWriter("none") as mock, pytest.raises(ArgumentError, match="storages in host memory"):
        mock.save_torch_storage_object_list(["text"], save_size=True)


def test_a_mock_counts_and_makes_no_file(tmp_path: Path) -> None:
    with MockFileWriter(tmp_path / "file") as file:
        torch.save(torch.zeros(1000), file)
        assert file.nbytes > 4000
        assert file.file_path() == str(tmp_path / "file")
    assert not (tmp_path / "file").exists()
    with pytest.raises(io.UnsupportedOperation):
        file.fileno()


def test_writing_after_close_is_refused(handle: AioHandle, tmp_path: Path) -> None:
    for writer in (FastFileWriter(tmp_path / "fast", config(handle)), PyFileWriter(tmp_path / "python")):
        writer.close()
        writer.close()
        with pytest.raises(UsageError, match=r"came after close\(\)"):
            writer.write(b"x")


def test_a_full_disk_is_raised_and_the_writer_is_closed(handle: AioHandle) -> None:
    file = FastFileWriter("/dev/full", config(handle))
    file.write(bytes(PAGE))
    with pytest.raises(FileIoError, match="cannot write /dev/full"):
        file.close()
    file.close()


def test_unfit_settings_are_refused_before_a_file_is_made(handle: AioHandle, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has 4096 bytes, but 2 x 4096 are the least"):
        FastFileWriter(tmp_path / "file", config(handle, PAGE))
    with pytest.raises(ArgumentError, match=r"writer_rank=2 on rank 5, but with num_parallel_writers=2"):
        FastFileWriter(tmp_path / "file", config(handle, num_parallel_writers=2, writer_rank=2, global_rank=5))
    with pytest.raises(ArgumentError, match="not contiguous host memory"):
        FastFileWriter(tmp_path / "file", FastFileWriterConfig(handle, torch.zeros(PAGE, 4).t()))
    assert not (tmp_path / "file").exists()
