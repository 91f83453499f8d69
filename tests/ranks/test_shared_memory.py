"""Real ranks reduce through shared memory: right numbers, no races, and no hang whatever happens to a rank."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm import shared_memory
from deepspeed.comm.algorithms import BackendReducer, FlatAllReducer, flat_all_reducer
from deepspeed.comm.recorder import RECORDER
from deepspeed.comm.shared_reducer import SharedMemoryReducer
from deepspeed.errors import CommError
from tests.support.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc exist on Linux alone")

_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _gradient(rank: int, seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` contributes; every process can compute every rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _mean(world_size: int, seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The mean that one process computes: summed in rank order in at least fp32, rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    total = _gradient(0, seed, numel, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + _gradient(rank, seed, numel, dtype).to(wide)
    return (total / world_size).to(dtype)


def _ranges(numel: int, seed: int, count: int) -> list[tuple[int, int]]:
    """Disjoint ranges over the whole buffer, empty and tiny ones among them."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, numel + 1, (count - 1,), generator=generator).tolist()
    return list(itertools.pairwise(sorted([0, 0, min(1, numel), min(3, numel), numel, *cuts])))


def _shared(reducer: FlatAllReducer) -> FlatAllReducer:
    assert isinstance(reducer, SharedMemoryReducer), reducer
    return reducer


# -------------------------------------------------------------------- numbers


def _reduce_every_dtype(rank: int, world_size: int, numel: int, rounds: int) -> None:
    for dtype in _DTYPES:
        reducer = _shared(flat_all_reducer(numel, dtype, timeout_seconds=30))
        for seed in range(rounds):
            reducer.buffer.copy_(_gradient(rank, seed, numel, dtype))
            for work in [reducer.launch(start, stop) for start, stop in _ranges(numel, seed, 5)]:
                work.wait()
            assert torch.equal(reducer.buffer, _mean(world_size, seed, numel, dtype)), (dtype, seed)
        reducer.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_holds_the_one_process_mean_bit_for_bit(world_size: int) -> None:
    run_ranks(_reduce_every_dtype, world_size, 10_007, 20)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranges_longer_than_a_block_hold_the_mean_too(world_size: int) -> None:
    run_ranks(_reduce_every_dtype, world_size, 700_001, 2)


@pytest.mark.parametrize("numel", [1, 2, 17])
def test_buffers_smaller_than_the_world_or_a_cache_line_hold_the_mean(numel: int) -> None:
    run_ranks(_reduce_every_dtype, 3, numel, 5)


def _accumulate_while_reducing(rank: int, world_size: int) -> None:
    """Reduce one half while adding gradients into the other, hundreds of times: any touch outside a range shows."""
    numel, half = 20_000, 10_000
    reducer = _shared(flat_all_reducer(numel, torch.float32, timeout_seconds=30))
    buffer = reducer.buffer
    expected = torch.zeros(numel)
    buffer[:half] = _gradient(rank, 0, half, torch.float32)
    expected[:half] = _mean(world_size, 0, half, torch.float32)
    in_flight, other = slice(0, half), slice(half, numel)
    for seed in range(1, 300):
        work = reducer.launch(in_flight.start, in_flight.stop)
        buffer[other].zero_()
        for quarter in torch.chunk(buffer[other], 4):  # autograd's in-place adds, some before peers have launched
            quarter.add_(1.0)
        buffer[other].sub_(1.0).add_(_gradient(rank, seed, half, torch.float32))
        work.wait()
        assert torch.equal(buffer[in_flight], expected[in_flight]), seed
        expected[other] = _mean(world_size, seed, half, torch.float32)
        in_flight, other = other, in_flight
    reducer.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_ranges_may_be_written_while_one_is_reduced(world_size: int) -> None:
    run_ranks(_accumulate_while_reducing, world_size)


def _reduce_out_of_step(rank: int, world_size: int) -> None:
    """Ranks arrive at different times and wait in a different order; a new step begins as soon as a rank is done."""
    numel = 3000
    reducer = _shared(flat_all_reducer(numel, torch.float32, timeout_seconds=30))
    for seed in range(200):
        reducer.buffer.copy_(_gradient(rank, seed, numel, torch.float32))
        if seed % 50 == rank:
            time.sleep(0.01)  # be late; the others must not run ahead into the next step's values
        works = [reducer.launch(start, start + 500) for start in range(0, numel, 500)]
        for work in works[:: -1 if rank else 1]:
            work.wait()
        assert torch.equal(reducer.buffer, _mean(world_size, seed, numel, torch.float32)), seed
    reducer.close()


def test_ranks_out_of_step_never_mix_two_steps() -> None:
    run_ranks(_reduce_out_of_step, 3)


def _reduce_in_subgroups(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    whole, part = (_shared(flat_all_reducer(10, torch.float32, group=group, timeout_seconds=30)) for group in (None, mine))
    whole.buffer.fill_(rank)
    part.buffer.fill_(rank)
    for reducer in (part, whole):
        reducer.launch(0, 10).wait()
    assert part.buffer.unique().tolist() == [rank % 2 + 1.0]
    assert whole.buffer.unique().tolist() == [1.5]
    for reducer in (part, whole):
        reducer.close()


def test_groups_reduce_beside_each_other() -> None:
    run_ranks(_reduce_in_subgroups, 4)


def _compare_with_back_end(rank: int, world_size: int) -> None:
    settings = [{}, {"prescale": True}, {"predivide_factor": 2.0}, {"communication_dtype": torch.float64}]
    for options in settings:
        shared = _shared(flat_all_reducer(1000, torch.float32, timeout_seconds=30, **options))
        plain = flat_all_reducer(1000, torch.float32, may_share_memory=False, **options)
        assert isinstance(plain, BackendReducer)
        for reducer in (shared, plain):
            reducer.buffer.copy_(_gradient(rank, 5, 1000, torch.float32))
            for work in [reducer.launch(0, 400), reducer.launch(400, 400), reducer.launch(400, 1000)]:
                work.wait()
                work.wait()
            reducer.close()
        # Three summands of order 1 in another order: two roundings of 2**-24 each way, and one for the division.
        torch.testing.assert_close(shared.buffer, plain.buffer, rtol=0, atol=8 * 2**-24)


def test_both_ways_agree_for_every_setting() -> None:
    run_ranks(_compare_with_back_end, 3)


def _bf16_travels(rank: int, world_size: int) -> torch.Tensor:
    reducer = flat_all_reducer(100, torch.float32, communication_dtype=torch.bfloat16, may_share_memory=False)
    reducer.buffer.copy_(_gradient(rank, 0, 100, torch.float32))
    reducer.launch(0, 100).wait()
    return reducer.buffer


def test_the_back_end_reduces_in_the_communication_dtype() -> None:
    expected = (_gradient(0, 0, 100, torch.float32).bfloat16() + _gradient(1, 0, 100, torch.float32).bfloat16()) / 2

    for buffer in run_ranks(_bf16_travels, 2):
        assert torch.equal(buffer, expected.float())


# -------------------------------------------------------------------- building and leaving


def _build_many(rank: int, world_size: int) -> None:
    def mappings() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:deepspeed" in line]

    fds = len(os.listdir("/proc/self/fd"))
    for seed in range(3):  # closed and built again
        reducers = [_shared(flat_all_reducer(1000 + i, torch.float32, timeout_seconds=30)) for i in range(10)]
        assert len(os.listdir("/proc/self/fd")) == fds
        assert len(mappings()) == 10 * (world_size + 1)
        assert all(line.endswith("(deleted)") for line in mappings())  # memory without a name: nothing in /dev/shm
        for reducer in reducers:
            reducer.buffer.copy_(_gradient(rank, seed, len(reducer.buffer), torch.float32))
        for work in [reducer.launch(0, len(reducer.buffer)) for reducer in reducers]:
            work.wait()
        for reducer in reducers:
            assert torch.equal(reducer.buffer, _mean(world_size, seed, len(reducer.buffer), torch.float32))
            reducer.close()
        del reducers, reducer, work
        assert mappings() == []


def test_many_reducers_share_a_process_and_leave_no_file_name_or_mapping() -> None:
    run_ranks(_build_many, 2)


def _train_a_layer(rank: int, world_size: int) -> torch.Tensor:
    """Gradients are views of the buffer, and autograd accumulates into them."""
    layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    numel = sum(p.numel() for p in layer.parameters())
    reducer = _shared(flat_all_reducer(numel, torch.float64, timeout_seconds=30))
    start = 0
    for p in layer.parameters():
        p.grad = reducer.buffer[start : start + p.numel()].view_as(p)
        start += p.numel()
    inputs = torch.arange(24.0, dtype=torch.float64).view(2, 3, 4) / 24
    for micro_batch in range(2):
        layer(inputs[micro_batch] * (rank + 1)).square().sum().backward()
    reducer.launch(0, numel).wait()
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    reducer.close()
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_gradients_accumulated_by_autograd_are_reduced_in_place() -> None:
    first, second = run_ranks(_train_a_layer, 2)
    assert torch.equal(first, second)

    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3, dtype=torch.float64)
    inputs = torch.arange(24.0, dtype=torch.float64).view(2, 3, 4) / 24
    loss = sum(layer(inputs[m] * (r + 1)).square().sum() for r in range(2) for m in range(2)) / 2
    loss.backward()
    alone = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
    torch.testing.assert_close(first, alone, rtol=1e-14, atol=1e-14)  # fp64, a dozen roundings


def _fall_back(rank: int, world_size: int) -> None:
    if rank == 1:

        def refuse() -> int:
            raise PermissionError(1, "not permitted here")

        shared_memory._unnamed_file = refuse
    reducer = flat_all_reducer(1000, torch.float32)
    assert isinstance(reducer, BackendReducer)
    reducer.buffer.copy_(_gradient(rank, 0, 1000, torch.float32))
    reducer.launch(0, 1000).wait()
    torch.testing.assert_close(reducer.buffer, _mean(world_size, 0, 1000, torch.float32), rtol=0, atol=8 * 2**-24)


def test_all_ranks_use_the_back_end_when_one_is_refused_memory() -> None:
    run_ranks(_fall_back, 3)


def _log_calls(rank: int, world_size: int) -> dict[str, dict[int, list[object]]]:
    RECORDER.enabled = True
    reducer = _shared(flat_all_reducer(1000, torch.float32, timeout_seconds=30))
    RECORDER.reset()
    for work in [reducer.launch(0, 500), reducer.launch(500, 1000)]:
        work.wait()
        work.wait()
    reducer.close()
    return RECORDER.comms_dict


def test_the_comms_log_counts_shared_memory_as_an_all_reduce() -> None:
    for log in run_ranks(_log_calls, 2):
        assert list(log) == ["all_reduce"]
        assert {nbytes: entry[0] for nbytes, entry in log["all_reduce"].items()} == {2000: 2}


# -------------------------------------------------------------------- faults


def _one_rank_dies(rank: int, world_size: int, how: str, folder: str) -> None:
    """Rank 1 dies in step 5; the others write what they saw, for a failed run returns no results."""
    reducer = _shared(flat_all_reducer(100_000, torch.float32, timeout_seconds=50))
    for step in range(10):
        if rank == 1 and step == 5:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(3)
            raise ValueError("my own reason")
        began = time.monotonic()
        try:
            reducer.launch(0, 100_000).wait()
        except CommError as error:
            seen = {"step": step, "seconds": time.monotonic() - began, "text": str(error), "survived": True}
            Path(folder, str(rank)).write_text(json.dumps(seen))
            return


@pytest.mark.alone
@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_a_rank_that_dies_is_named_within_a_second_by_all_others(how: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_one_rank_dies, 3, how, str(tmp_path))

    assert [failure.rank for failure in caught.value.failures] == [1]
    for rank in (0, 2):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert seen["step"] == 5
        assert f"rank {rank}: the mean of gradient elements [0, 100000) of 100000 over ranks [0, 1, 2]" in seen["text"]
        assert "rank 1 (process " in seen["text"]
        assert ") died" in seen["text"]
        assert seen["seconds"] < 1.0 + 1.0  # noticed within 0.1 s; the second is for a loaded machine


def _one_rank_is_late(rank: int, world_size: int) -> str:
    reducer = _shared(flat_all_reducer(100, torch.float32, timeout_seconds=0.5))
    dist.barrier()
    if rank == 1:
        dist.barrier()  # leaves when the others have timed out
        with pytest.raises(CommError, match="cannot complete: rank 0 failed; rank 2 failed"):
            reducer.launch(0, 100).wait()
        return ""
    with pytest.raises(CommError) as caught:
        reducer.launch(0, 100).wait()
    dist.barrier()
    return str(caught.value)


def test_a_late_rank_is_named_at_the_time_out_and_told_when_it_comes() -> None:
    first, _, third = run_ranks(_one_rank_is_late, 3)

    for text in (first, third):
        assert "[0, 100) of 100 over ranks [0, 1, 2] did not complete within 0.5 s" in text
        assert "waiting for rank(s) [1] to launch it" in text


def _group_has_a_limit(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.6))
    reducer = _shared(flat_all_reducer(100, torch.float32, group=group))
    if rank == 0:
        with pytest.raises(CommError, match=r"within 0\.6 s: waiting for rank\(s\) \[1\]"):
            reducer.launch(0, 100).wait()
    dist.barrier()


def test_the_limit_of_the_process_group_holds_for_shared_memory_too() -> None:
    run_ranks(_group_has_a_limit, 2)


def _wait_longer_than_a_time_slice(rank: int, world_size: int) -> float:
    """Processor seconds that rank 0 spends waiting two seconds for rank 1."""
    reducer = _shared(flat_all_reducer(100, torch.float32, timeout_seconds=30))
    dist.barrier()
    if rank == 1:
        time.sleep(2.0)
    began = time.process_time()
    reducer.launch(0, 100).wait()
    took = time.process_time() - began
    reducer.close()
    return took


def test_waiting_does_not_burn_a_core() -> None:
    assert run_ranks(_wait_longer_than_a_time_slice, 2)[0] < 0.4  # a fifth of a core; measured 0.05


def _different_sizes(rank: int, world_size: int) -> None:
    with pytest.raises(CommError, match=r"\[100, 101\] elements by group rank"):
        flat_all_reducer(100 + rank, torch.float32)


def test_ranks_with_different_models_are_told_at_the_start() -> None:
    run_ranks(_different_sizes, 2)


def _back_end_loses_a_rank(rank: int, world_size: int, folder: str) -> None:
    reducer = flat_all_reducer(100, torch.float32, may_share_memory=False)
    reducer.launch(0, 100).wait()
    if rank == 1:
        os._exit(3)
    try:
        reducer.launch(0, 100).wait()
    except CommError as error:
        Path(folder, "text").write_text(str(error))


def test_the_back_end_reports_a_dead_rank_as_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(_back_end_loses_a_rank, 2, str(tmp_path))

    assert (
        "over ranks [0, 1] failed" in (tmp_path / "text").read_text()
        or "in the group of ranks [0, 1]" in (tmp_path / "text").read_text()
    )
