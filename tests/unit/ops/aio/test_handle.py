from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.errors import ArgumentError, FileIoError, HostMemoryError, UnbuiltFeatureError
from deepspeed.ops.aio.handle import AioHandle
from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder


@pytest.fixture
def handle() -> Iterator[AioHandle]:
    with AsyncIOBuilder().load().aio_handle(block_size=8192, queue_depth=4, intra_op_parallelism=2) as handle:
        yield handle


def test_the_builder_gives_a_handle_with_the_settings_it_was_made_with() -> None:
    with AsyncIOBuilder().load().aio_handle(65536, 16, True, False, 3) as handle:
        assert handle.get_block_size() == 65536
        assert handle.get_queue_depth() == 16
        assert handle.get_single_submit() is True
        assert handle.get_overlap_events() is False
        assert handle.get_intra_op_parallelism() == 3
        assert handle.get_alignment() == 4096
    with AioHandle() as handle:
        assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 20, 128, 1)
        assert handle.get_single_submit() is False
        assert handle.get_overlap_events() is False
    with pytest.raises(ArgumentError, match=r"queue_depth=0.* from 1 to"):
        AioHandle(queue_depth=0)


def test_a_blocking_write_is_a_file_when_it_returns(handle: AioHandle, tmp_path: Path) -> None:
    data = torch.randn(1000, 33)
    assert handle.sync_pwrite(data, str(tmp_path / "file")) == 1
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()
    found = torch.empty_like(data)
    assert handle.sync_pread(found, tmp_path / "file") == 1
    assert torch.equal(found, data)
    assert handle.write(data * 2, tmp_path / "file", True) == 1
    assert handle.read(found, tmp_path / "file", True) == 1
    assert torch.equal(found, data * 2)


def test_wait_tells_how_many_transfers_are_done(handle: AioHandle, tmp_path: Path) -> None:
    parts = [torch.full((5000,), float(number)) for number in range(5)]
    for number, part in enumerate(parts):
        assert handle.async_pwrite(part, tmp_path / str(number)) == 0
    assert handle.wait() == 5
    assert handle.wait() == 0
    found = [torch.empty_like(part) for part in parts]
    for number, part in enumerate(found):
        handle.async_pread(part, tmp_path / str(number))
    assert handle.wait() == 5
    assert all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))


def test_tensors_lie_at_offsets_of_one_file(handle: AioHandle, tmp_path: Path) -> None:
    parts = [torch.randn(1025) for _ in range(4)]
    for number, part in enumerate(parts):
        handle.pwrite(part, tmp_path / "file", False, True, number * part.nbytes)
        handle.wait()
    found = torch.empty(4 * 1025)
    handle.pread(found, tmp_path / "file", True, False)
    assert torch.equal(found, torch.cat(parts))
    part = torch.empty(1025)
    handle.sync_pread(part, tmp_path / "file", file_offset=2 * part.nbytes)
    assert torch.equal(part, parts[2])


def test_writing_a_part_keeps_the_rest_of_a_file(handle: AioHandle, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    handle.sync_pwrite(torch.zeros(100, dtype=torch.uint8), tmp_path / "file", 50)
    assert (tmp_path / "file").read_bytes() == b"x" * 50 + bytes(100) + b"x" * 9850


def test_an_open_file_is_written_through_its_descriptor(handle: AioHandle, tmp_path: Path) -> None:
    data = torch.randn(5000)
    with (tmp_path / "file").open("w+b") as file:
        handle.async_pwrite(data, file.fileno())
        assert handle.wait() == 1
        assert file.read() == data.numpy().tobytes()


def test_locked_tensors_are_aligned_and_known_to_their_handle(handle: AioHandle) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    assert tensor.shape == (1000,)
    assert tensor.dtype is torch.bfloat16
    assert tensor.data_ptr() % 4096 == 0
    assert handle.is_pinned(tensor)
    assert handle.is_pinned(tensor[10:])
    assert not handle.is_pinned(torch.zeros(4))
    assert handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    assert tensor.fill_(1).sum() == 1000  # the caller's reference keeps the memory


def test_a_failed_transfer_is_raised_by_wait_and_the_others_are_done(handle: AioHandle, tmp_path: Path) -> None:
    data = torch.randn(5000)
    handle.async_pwrite(data, tmp_path / "good")
    handle.async_pwrite(data, "/dev/full")
    handle.async_pwrite(data, tmp_path / "too")
    with pytest.raises(FileIoError, match="cannot write /dev/full"):
        handle.wait()
    assert (tmp_path / "good").read_bytes() == (tmp_path / "too").read_bytes() == data.numpy().tobytes()
    assert handle.wait() == 0


def test_a_wait_that_is_interrupted_forgets_nothing(
    handle: AioHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.randn(5000)
    for name in ("a", "b", "c"):
        handle.async_pwrite(data, tmp_path / name)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(handle._pending[1].request, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    monkeypatch.undo()
    assert handle.wait() == 2
    assert all((tmp_path / name).read_bytes() == data.numpy().tobytes() for name in ("a", "b", "c"))


def test_bad_transfers_are_refused_at_once(handle: AioHandle, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(FileIoError, match="has 100 bytes, but 400 were needed"):
        handle.async_pread(torch.empty(100), tmp_path / "short")
    with pytest.raises(FileIoError, match="No such file"):
        handle.sync_pread(torch.empty(100), tmp_path / "none")
    with pytest.raises(ArgumentError, match="file_offset=-4"):
        handle.sync_pwrite(torch.zeros(4), tmp_path / "file", -4)
    with pytest.raises(HostMemoryError, match=r"bytes of host memory were asked for, .* are free. Ask for less"):
        handle.new_cpu_locked_tensor(1 << 58, torch.empty(0, dtype=torch.uint8))
    assert not (tmp_path / "file").exists()
    with pytest.raises(ArgumentError, match="only contiguous"):
        handle.sync_pwrite(torch.zeros(4, 4).t(), tmp_path / "file")
    assert handle.wait() == 0


def test_validation_finds_a_file_that_changed_meanwhile(handle: AioHandle, tmp_path: Path) -> None:
    data = torch.arange(10_000, dtype=torch.int32)
    handle.pwrite(data, tmp_path / "file", True, True)
    handle._pending[0].request.wait()
    with (tmp_path / "file").open("r+b") as other:
        other.seek(12_345)
        other.write(b"\xff")
    with pytest.raises(FileIoError, match="differs from the tensor that was moved, first at byte 12345"):
        handle.wait()


def test_one_call_functions_move_one_tensor(tmp_path: Path) -> None:
    module = AsyncIOBuilder().load()
    data = torch.randn(3000)
    assert module.aio_write(data, str(tmp_path / "file"), 4096, 4, False, True, True) == 1
    found = torch.empty_like(data)
    assert module.aio_read(found, str(tmp_path / "file"), 4096, 4, False, True, True) == 1
    assert torch.equal(found, data)
    assert module.deepspeed_memcpy(found, data + 1) == 1
    assert torch.equal(found, data + 1)
    with pytest.raises(ArgumentError, match="tensors that are alike"):
        module.deepspeed_memcpy(found, data[1:])


def test_direct_access_of_a_gpu_is_refused_with_what_takes_its_place() -> None:
    assert not GDSBuilder().is_compatible()
    with pytest.raises(UnbuiltFeatureError, match="aio_handle of async_io takes tensors on a GPU too"):
        GDSBuilder().load()
