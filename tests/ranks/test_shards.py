"""Real ranks reduce-scatter and gather, in shared memory and through gloo: right bits, no races, and no hang."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.algorithms import (
    BackendGatherer,
    BackendReduceScatterer,
    FlatGatherer,
    FlatReduceScatterer,
    LocalGatherer,
    LocalReduceScatterer,
    flat_all_reducer,
    flat_gatherer,
    flat_reduce_scatterer,
)
from deepspeed.comm.recorder import RECORDER
from deepspeed.comm.shared_shards import SharedMemoryGatherer, SharedMemoryReduceScatterer
from deepspeed.errors import CommError
from tests.support.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc exist on Linux alone")

_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _gradient(rank: int, seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` contributes; every process can compute every rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _scatterer(numel: int, dtype: torch.dtype, is_shared: bool, **options: object) -> FlatReduceScatterer:
    scatterer = flat_reduce_scatterer(numel, dtype, timeout_seconds=30, may_share_memory=is_shared, **options)  # type: ignore[arg-type]
    several = SharedMemoryReduceScatterer if is_shared else BackendReduceScatterer
    assert isinstance(scatterer, several if dist.get_world_size() > 1 else LocalReduceScatterer)
    return scatterer


def _gatherer(numel: int, dtype: torch.dtype, is_shared: bool) -> FlatGatherer:
    gatherer = flat_gatherer(numel, dtype, timeout_seconds=30, may_share_memory=is_shared)
    several = SharedMemoryGatherer if is_shared else BackendGatherer
    assert isinstance(gatherer, several if dist.get_world_size() > 1 else LocalGatherer)
    return gatherer


def _ranges(numel: int, world_size: int, seed: int, count: int) -> list[tuple[int, int]]:
    """Disjoint ranges over the whole buffer, each a multiple of the world size, empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.randint(0, numel // world_size + 1, (count - 1,), generator=generator) * world_size).tolist()
    return list(itertools.pairwise(sorted([0, 0, world_size, numel, *cuts])))


def _own(start: int, stop: int, rank: int, world_size: int) -> slice:
    part = (stop - start) // world_size
    return slice(start + rank * part, start + (rank + 1) * part)


# -------------------------------------------------------------------- reduce-scatter: numbers


def _compare_with_all_reduce(rank: int, world_size: int, is_shared: bool, numel: int) -> None:
    settings = [{}, {"communication_dtype": torch.float32}, {"communication_dtype": torch.bfloat16}]
    settings += [{"prescale": True}, {"predivide_factor": 3.0}]
    for dtype, options in itertools.product(_DTYPES, settings):
        whole = flat_all_reducer(numel, dtype, timeout_seconds=30, **options)
        in_place, added = (_scatterer(numel, dtype, is_shared, **options) for _ in range(2))
        for seed in range(2):
            for buffer in (whole.buffer, in_place.buffer, added.buffer):
                buffer.copy_(_gradient(rank, seed, numel, dtype))
            whole.launch(0, numel).wait()
            ranges = _ranges(numel, world_size, seed, 6)
            shards = [torch.ones((stop - start) // world_size) for start, stop in ranges]
            works = [in_place.launch(start, stop) for start, stop in ranges]
            works += [added.launch(*each, into, accumulate=True) for each, into in zip(ranges, shards, strict=True)]
            for work in works[:: -1 if rank else 1]:
                work.wait_free()
            for (start, stop), shard in zip(ranges, shards, strict=True):
                own = _own(start, stop, rank, world_size)
                assert torch.equal(in_place.buffer[own], whole.buffer[own]), (dtype, options)
                wide = torch.promote_types(dtype, torch.float32)
                one_more = (1 + whole.buffer[own].to(wide)).float()
                assert torch.equal(shard, one_more), (dtype, options)
        for reducer in (whole, in_place, added):
            reducer.close()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_own_parts_have_the_bits_of_the_all_reduce(world_size: int, is_shared: bool) -> None:
    run_ranks(_compare_with_all_reduce, world_size, is_shared, 12 * 401)


def test_ranges_longer_than_a_block_have_them_too() -> None:
    run_ranks(_compare_with_all_reduce, 2, True, 2 * 140_001)


def _accumulate_through_two_slots(rank: int, world_size: int, is_shared: bool) -> None:
    """Stage 2: many buckets pass through a pool of two slots while shards in fp32 add up over micro-batches."""
    slot, buckets, micro_batches = 60, 7, 5
    part = slot // world_size
    scatterer = _scatterer(2 * slot, torch.bfloat16, is_shared)
    shard = torch.zeros(buckets * part)
    expected = torch.zeros(buckets * part)
    works: list = [None, None]
    for step, (micro_batch, bucket) in enumerate(itertools.product(range(micro_batches), range(buckets))):
        start = step % 2 * slot
        if works[step % 2] is not None:
            works[step % 2].wait_free()
        if step % 5 == rank:
            time.sleep(0.002)  # be late; nobody may write what this rank still has to read
        scatterer.buffer[start : start + slot] = _gradient(rank, step, slot, torch.bfloat16)
        into = shard[bucket * part : (bucket + 1) * part]
        works[step % 2] = scatterer.launch(start, start + slot, into, accumulate=micro_batch > 0)
        total = torch.stack([_gradient(r, step, slot, torch.bfloat16).float() for r in range(world_size)]).sum(0)
        expected[bucket * part : (bucket + 1) * part] += (total / world_size).bfloat16()[_own(0, slot, rank, world_size)]
    for work in works:
        work.wait()
    assert torch.equal(shard, expected)
    scatterer.close()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_add_up_over_micro_batches_through_a_pool_of_two_slots(world_size: int, is_shared: bool) -> None:
    run_ranks(_accumulate_through_two_slots, world_size, is_shared)


def _launch_everything_out_of_step(rank: int, world_size: int, is_shared: bool) -> None:
    """Stage 1: all ranges of a step are in flight at once, waited for in any order, written again when free."""
    numel, step = 3000, 300
    scatterer = _scatterer(numel, torch.float32, is_shared)
    for seed in range(60):
        scatterer.buffer.copy_(_gradient(rank, seed, numel, torch.float32))
        if seed % 20 == rank:
            time.sleep(0.01)
        works = []
        for start in range(0, numel, step):
            works.append(scatterer.launch(start, start + step))
            sum(range(2000 * rank))  # ranks of different speed
        for work in works[:: -1 if rank else 1]:
            work.wait()
        for start in range(0, numel, step):
            own = _own(start, start + step, rank, world_size)
            total = _gradient(0, seed, numel, torch.float32)
            for other in range(1, world_size):
                total = total + _gradient(other, seed, numel, torch.float32)
            assert torch.equal(scatterer.buffer[own], (total / world_size)[own]), seed
        for work in works:
            work.wait_free()
    scatterer.close()


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_out_of_step_never_mix_two_steps(is_shared: bool) -> None:
    run_ranks(_launch_everything_out_of_step, 3, is_shared)


# -------------------------------------------------------------------- all-gather


def _gather_versions(rank: int, world_size: int, is_shared: bool) -> None:
    numel = 1200
    for dtype in _DTYPES:
        whole, shard = _gatherer(numel, dtype, is_shared), _gatherer(numel // world_size, dtype, is_shared)
        for version in range(25):
            for gatherer in (whole, shard):
                gatherer.begin_update()
            if version % 8 == rank:
                time.sleep(0.005)  # the others must neither read early nor write early
            right = _gradient(0, version, numel, dtype)
            whole.buffer.fill_(torch.nan)
            ranges = _ranges(numel, world_size, version, 4)
            for start, stop in ranges:
                own = _own(start, stop, rank, world_size)
                whole.buffer[own] = right[own]
            shard.buffer.copy_(right[_own(0, numel, rank, world_size)])
            for gatherer in (whole, shard):
                gatherer.publish()
            works = [whole.gather_in_place(start, stop) for start, stop in ranges]
            units = [(start // world_size, stop // world_size) for start, stop in ranges]
            gathered = [torch.full((world_size * (high - low),), torch.nan, dtype=dtype) for low, high in units]
            works += [shard.gather(*unit, into) for unit, into in zip(units, gathered, strict=True)]
            for work in works[:: -1 if rank else 1]:
                work.wait()
            assert torch.equal(whole.buffer, right), (dtype, version)
            for (low, high), into in zip(units, gathered, strict=True):
                assert torch.equal(into, right.view(world_size, -1)[:, low:high].flatten()), (dtype, version)
        for gatherer in (whole, shard):
            gatherer.begin_update()
            gatherer.close()


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_reads_the_version_that_all_are_at(world_size: int, is_shared: bool) -> None:
    run_ranks(_gather_versions, world_size, is_shared)


def _gather_different_things(rank: int, world_size: int) -> None:
    """Ranks gather other ranges in other numbers, as routed experts do."""
    gatherer = _gatherer(100, torch.float32, is_shared=True)
    for version in range(50):
        gatherer.begin_update()
        gatherer.buffer.fill_(10 * version + rank)
        gatherer.publish()
        for count in range((rank + version) % world_size):
            into = torch.empty(world_size * (5 + rank))
            gatherer.gather(count, count + 5 + rank, into).wait()
            assert into.view(world_size, -1)[:, 0].tolist() == [10.0 * version + r for r in range(world_size)]
    gatherer.begin_update()
    gatherer.close()


def test_in_shared_memory_each_rank_gathers_what_it_needs() -> None:
    run_ranks(_gather_different_things, 3)


def _use_subgroups(rank: int, world_size: int, is_shared: bool) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group, me = groups[rank % 2], dist.get_rank(groups[rank % 2])
    ranks = dist.get_process_group_ranks(group)
    scatterer = flat_reduce_scatterer(8, torch.float32, group=group, may_share_memory=is_shared)
    gatherer = flat_gatherer(2, torch.float32, group=group, may_share_memory=is_shared)
    scatterer.buffer.copy_(torch.arange(8.0) + 10 * rank)
    gatherer.buffer.fill_(rank)
    gatherer.publish()
    scatterer.launch(0, 8).wait_free()
    into = torch.empty(4)
    gatherer.gather(0, 2, into).wait()
    assert scatterer.buffer[4 * me : 4 * me + 4].tolist() == [e + 5.0 * sum(ranks) for e in range(4 * me, 4 * me + 4)]
    assert into.tolist() == [ranks[0], ranks[0], ranks[1], ranks[1]]
    gatherer.begin_update()
    for each in (scatterer, gatherer):
        each.close()


@pytest.mark.parametrize("is_shared", [True, False])
def test_subgroups_keep_to_themselves(is_shared: bool) -> None:
    run_ranks(_use_subgroups, 4, is_shared)


# -------------------------------------------------------------------- what is counted


def _log_calls(rank: int, world_size: int, is_shared: bool) -> dict[str, dict[int, int]]:
    scatterer, gatherer = _scatterer(600, torch.bfloat16, is_shared), _gatherer(600, torch.float32, is_shared)
    gatherer.publish()
    RECORDER.enabled = True
    RECORDER.reset()
    works = [scatterer.launch(0, 300), scatterer.launch(300, 600, torch.zeros(300 // world_size), accumulate=True)]
    for work in works:
        work.wait()
        work.wait_free()
    for work in [gatherer.gather_in_place(0, 600), gatherer.gather(0, 100, torch.empty(100 * world_size))]:
        work.wait()
        work.wait()
    RECORDER.enabled = False
    gatherer.begin_update()
    return {name: {nbytes: entry[0] for nbytes, entry in sizes.items()} for name, sizes in RECORDER.comms_dict.items()}


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_comms_log_counts_each_range_once_with_the_bytes_of_all_parts(world_size: int, is_shared: bool) -> None:
    for log in run_ranks(_log_calls, world_size, is_shared):
        assert log == {
            "reduce_scatter_tensor": {600: 2},
            "all_gather_into_tensor": {2400: 1, 400 * world_size: 1},
        }


# -------------------------------------------------------------------- faults


def _die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("my own reason")


def _one_rank_dies(rank: int, world_size: int, how: str, where: str, folder: str) -> None:
    """Rank 1 dies in step 5; the others write what they saw, for a failed run returns no results."""
    scatterer, gatherer = _scatterer(90_000, torch.float32, True), _gatherer(90_000, torch.float32, True)
    for step in range(10):
        is_last = rank == 1 and step == 5
        if is_last and where != "update":
            _die(how)
        began = time.monotonic()
        try:
            if where == "reduce":
                scatterer.launch(0, 90_000).wait_free()
                continue
            gatherer.publish()
            gatherer.gather_in_place(0, 90_000).wait()
            if is_last:
                _die(how)
            gatherer.begin_update()
        except CommError as error:
            seen = {"step": step, "seconds": time.monotonic() - began, "text": str(error)}
            Path(folder, str(rank)).write_text(json.dumps(seen))
            return


_DOING = {
    "reduce": "the reduce-scatter of gradient elements [0, 90000) of 90000",
    "gather": "a gather of version 6 of 90000 parameter elements per rank",
    "update": "the update after version 6 of 90000 parameter elements per rank",
}


@pytest.mark.alone
@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("where", ["reduce", "gather", "update"])
def test_a_rank_that_dies_is_named_within_a_second_by_all_others(where: str, how: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_one_rank_dies, 3, how, where, str(tmp_path))

    assert [failure.rank for failure in caught.value.failures] == [1]
    for rank in (0, 2):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert seen["step"] == 5
        assert f"rank {rank}: {_DOING[where]} over ranks [0, 1, 2]" in seen["text"]
        assert "rank 1 (process " in seen["text"]
        assert ") died" in seen["text"]
        assert seen["seconds"] < 1.0 + 1.0  # noticed within 0.2 s; the second is for a loaded machine


def _back_end_loses_a_rank(rank: int, world_size: int, where: str, folder: str) -> None:
    scatterer, gatherer = _scatterer(100, torch.float32, False), _gatherer(100, torch.float32, False)
    gatherer.publish()
    dist.barrier()
    if rank == 1:
        os._exit(3)
    try:
        (scatterer.launch(0, 100) if where == "reduce" else gatherer.gather_in_place(0, 100)).wait()
    except CommError as error:
        Path(folder, "text").write_text(str(error))


@pytest.mark.parametrize("where", ["reduce", "gather"])
def test_the_back_end_reports_a_dead_rank_as_an_error_of_ours(where: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(_back_end_loses_a_rank, 2, where, str(tmp_path))

    text = (tmp_path / "text").read_text()
    assert "over ranks [0, 1] failed" in text or "in the group of ranks [0, 1]" in text


def _different_ranges(rank: int, world_size: int) -> str:
    scatterer = _scatterer(100, torch.float32, True)
    with pytest.raises(CommError) as caught:
        scatterer.launch(0, 10 + 2 * rank).wait()
    dist.barrier()
    return str(caught.value)


def test_ranks_that_launch_different_ranges_are_both_told() -> None:
    first, second = run_ranks(_different_ranges, 2)

    assert "[0, 10) of 100 over ranks [0, 1]" in first
    assert "[0, 12) of 100 over ranks [0, 1]" in second
    assert any(
        text.endswith("as its launch number 1. All ranks must launch the same ranges in the same order.")
        for text in (first, second)  # the slower may hear of the other's failure first
    )


def _different_sizes(rank: int, world_size: int) -> None:
    for build in (flat_reduce_scatterer, flat_gatherer):
        with pytest.raises(CommError, match=r"\[100, 102\] elements by group rank"):
            build(100 + 2 * rank, torch.float32)


def test_ranks_with_different_models_are_told_at_the_start() -> None:
    run_ranks(_different_sizes, 2)
