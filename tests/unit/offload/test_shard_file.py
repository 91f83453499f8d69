from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from deepspeed.errors import FileIoError
from deepspeed.offload import shard_file
from deepspeed.offload.shard_file import ShardFile
from deepspeed.ops.aio.engine import IoSettings


def test_shards_of_any_size_and_dtype_come_back_in_any_order(tmp_path: Path) -> None:
    file = ShardFile(tmp_path, "test", IoSettings())
    values = [
        torch.randn(numel).to(dtype) for numel in (0, 1, 33, 5000) for dtype in (torch.float32, torch.bfloat16, torch.uint8)
    ]
    runs = [file.keep(each) for each in values]
    for run, each in reversed(list(zip(runs, values, strict=True))):
        assert torch.equal(run.load(), each)
    runs[-2].save(torch.full((10,), 3.0, dtype=torch.bfloat16))
    expected = values[-2].clone()
    expected[:10] = 3
    assert torch.equal(runs[-2].load(), expected)
    assert all(torch.equal(run.load(), each) for run, each in zip(runs[:-2], values[:-2], strict=True))
    file.close()


def test_the_file_lives_as_long_as_a_run_of_it(tmp_path: Path) -> None:
    file = ShardFile(tmp_path, "test", IoSettings())
    run = file.keep(torch.ones(5))
    del file
    gc.collect()
    assert torch.equal(run.load(), torch.ones(5))
    assert len(list(tmp_path.iterdir())) == 1
    del run
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_settled_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ShardFile(tmp_path, "test", IoSettings())

    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_file.os, "posix_fallocate", full)
    with pytest.raises(
        FileIoError, match=r"shards needs 4096 bytes by now, and \d+ more are free .* No space left"
    ) as caught:
        file.keep(torch.ones(5))
    assert caught.value.errno == 28
    file.close()
