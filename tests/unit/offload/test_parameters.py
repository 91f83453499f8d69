"""One rank's parameters in a file: read for gathers, written behind updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.comm.algorithms import local_stage
from deepspeed.errors import FileIoError, UsageError
from deepspeed.offload.parameter_plan import BucketShard, plan_parameters
from deepspeed.offload.parameters import ParameterFile, ParameterTier, TieredShards
from deepspeed.offload.swap_folder import SwapFolder
from deepspeed.ops.aio.engine import IoEngine, aligned_empty

NUMELS = {0: 5000, 1: 3000, 2: 4000}


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ParameterTier]:
    shards = [BucketShard(0, n, n, numel, 2, f"p{n}") for n, numel in NUMELS.items()]
    plan = plan_parameters(shards, max_in_cpu=0, buffer_size=5000, buffer_count=2)
    file = ParameterFile(IoEngine(), SwapFolder.claim(tmp_path, "test"), plan.file_nbytes)
    made = ParameterTier(plan, file, local_stage(plan.buffer_count, plan.buffer_nbytes, aligned_empty))
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def shards(tier: ParameterTier) -> TieredShards:
    found = tier.shards(0, torch.bfloat16, NUMELS)
    assert found is not None
    return found


def _values(bucket: int) -> torch.Tensor:
    return (torch.arange(NUMELS[bucket]) % 251 + bucket).to(torch.bfloat16)


def _filled(shards: TieredShards) -> TieredShards:
    for bucket in NUMELS:
        shards.write(bucket, 0, _values(bucket).float())
    shards.publish()
    return shards


def test_a_gather_brings_what_was_written(shards: TieredShards) -> None:
    _filled(shards)
    intos = {bucket: torch.empty(numel, dtype=torch.bfloat16) for bucket, numel in NUMELS.items()}
    works = [shards.gather(bucket, into) for bucket, into in intos.items()]
    for work in works:
        work.wait()
    assert all(torch.equal(into, _values(bucket)) for bucket, into in intos.items())


def test_a_range_is_read_and_written_wherever_it_begins(shards: TieredShards) -> None:
    _filled(shards)
    shards.begin_update()
    shards.write(1, 1001, torch.full((77,), 7.0))
    expected = _values(1)
    expected[1001:1078] = 7
    assert torch.equal(shards.read(1, 990, 2999), expected[990:2999])  # before it is published, too
    shards.publish()
    assert torch.equal(shards.read(1, 0, 3000), expected)
    assert torch.equal(shards.read(0, 0, 5000), _values(0))
    assert torch.equal(shards.read(2, 0, 4000), _values(2))


def test_writing_what_is_published_and_gathering_what_is_not_are_refused(shards: TieredShards) -> None:
    with pytest.raises(UsageError, match="while version 1 of the buffer is being written"):
        shards.gather(0, torch.empty(5000, dtype=torch.bfloat16))
    _filled(shards)
    with pytest.raises(UsageError, match="published"):
        shards.write(0, 0, torch.ones(1))


def test_a_file_that_was_cut_short_is_settled_by_the_gather(shards: TieredShards, tier: ParameterTier) -> None:
    _filled(shards)
    with tier.file.file.path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(FileIoError, match=r"parameters: .* could be read: the file ends at byte 4096"):
        shards.gather(0, torch.empty(5000, dtype=torch.bfloat16)).wait()


def test_the_last_group_to_leave_removes_the_file(tier: ParameterTier) -> None:
    groups = [tier.shards(0, torch.bfloat16, NUMELS), tier.shards(0, torch.bfloat16, NUMELS)]
    assert tier.shards(1, torch.bfloat16, NUMELS) is None
    folder = tier.file.file.path.parent
    for group in groups:
        assert group is not None
        assert folder.exists()
        group.close()
        group.close()
    assert not folder.exists()


def test_space_that_is_not_there_is_settled_with_the_numbers(tmp_path: Path) -> None:
    with IoEngine() as io, pytest.raises(FileIoError, match=r"needs 4611686018427387904 bytes, \d+ are free"):
        ParameterFile(io, SwapFolder.claim(tmp_path, "test"), 1 << 62)
