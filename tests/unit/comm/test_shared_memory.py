"""Ranks are threads here: the files, the board and the reducers are those of real ranks, the gather is a list."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deepspeed.comm import shared_memory
from deepspeed.comm.board import Board
from deepspeed.comm.mean import MeanRule
from deepspeed.comm.patience import Patience
from deepspeed.comm.shared_memory import Gather, SharedMemory, share_memory
from deepspeed.comm.shared_reducer import SharedMemoryReducer, _RangeWork
from deepspeed.errors import ArgumentError, CommError, UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc exist on Linux alone")


class _Gather:
    """All-gather between threads; `change` may tamper with what a rank hears in round 0, 1, ..."""

    def __init__(self, world_size: int, change: Callable[[int, list[list[int]]], None] = lambda _, __: None) -> None:
        self._barrier = threading.Barrier(world_size, timeout=10)
        self._values: list[list[int]] = [[] for _ in range(world_size)]
        self._change = change

    def of(self, rank: int) -> Gather:
        rounds = iter(range(10))

        def gather(values: list[int]) -> list[list[int]]:
            self._values[rank] = values
            self._barrier.wait()
            heard = [list(each) for each in self._values]
            self._barrier.wait()
            self._change(next(rounds), heard)
            return heard

        return gather


def _share(world_size: int, gather: _Gather | None = None, numel: int = 100, **unwilling: bool) -> list[SharedMemory | str]:
    gather = gather or _Gather(world_size)

    def one(rank: int) -> SharedMemory | str:
        return share_memory(numel, torch.float32, rank, world_size, gather.of(rank), not unwilling.get(f"rank{rank}"))

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(one, range(world_size)))


def _reducers(world_size: int = 2, timeout_seconds: float = 0.3, numel: int = 100) -> list[SharedMemoryReducer]:
    reducers = []
    for rank, memory in enumerate(_share(world_size, numel=numel)):
        assert isinstance(memory, SharedMemory)
        ranks = [10 + r for r in range(world_size)]
        rule, patience = MeanRule(world_size), Patience(timeout_seconds)
        reducers.append(SharedMemoryReducer(memory, rank, ranks, rule, torch.float32, patience))
    return reducers


def _wait_all(works: list[_RangeWork]) -> None:
    with ThreadPoolExecutor(len(works)) as threads:
        list(threads.map(lambda work: work.wait(), works))


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:deepspeed")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    fds = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_every_rank_sees_what_any_rank_writes() -> None:
    memories = _share(3)

    for rank, memory in enumerate(memories):
        assert isinstance(memory, SharedMemory)
        assert memory.rows[rank].tolist() == [0.0] * 100
        memory.rows[rank].fill_(rank + 1)

    for memory in memories:
        assert isinstance(memory, SharedMemory)
        assert [row.unique().tolist() for row in memory.rows] == [[1.0], [2.0], [3.0]]


def test_a_row_has_storage_of_its_own_and_of_its_size() -> None:
    memory = _share(2)[0]

    assert isinstance(memory, SharedMemory)
    assert [row.untyped_storage().nbytes() for row in memory.rows] == [400, 400]


def test_sharing_keeps_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))

    memories = _share(2)

    assert len(os.listdir("/proc/self/fd")) == before
    assert all(isinstance(memory, SharedMemory) for memory in memories)


def test_a_refused_file_on_one_rank_sends_all_to_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    create, calls = shared_memory._unnamed_file, iter([False, True])

    def refuse_the_second() -> int:
        if next(calls, False):
            raise PermissionError(1, "seccomp says no")
        return create()

    monkeypatch.setattr(shared_memory, "_unnamed_file", refuse_the_second)
    reasons = _share(3)

    assert all(isinstance(reason, str) and "cannot create shared memory" in reason for reason in reasons)
    assert sum("seccomp says no" in str(reason) for reason in reasons) == 1


def test_running_out_of_descriptors_is_a_reason_and_leaks_none() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 4, hard))
    try:
        reasons = _share(12)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert all(isinstance(reason, str) for reason in reasons)
    assert any("Too many open files" in str(reason) for reason in reasons)


def test_one_unwilling_rank_decides_for_all() -> None:
    assert all("group rank(s) [1] cannot create" in str(reason) for reason in _share(2, rank1=True))


def test_another_processor_or_system_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")

    assert all("linux on aarch64, needed Linux on x86_64" in str(reason) for reason in _share(2))


def _other_host(_: int, heard: list[list[int]]) -> None:
    if len(heard[0]) > 1:
        heard[1][4] += 1


def _other_inode(_: int, heard: list[list[int]]) -> None:
    if len(heard[0]) > 1:
        heard[1][9] += 1


def _other_start(_: int, heard: list[list[int]]) -> None:
    if len(heard[0]) > 1:
        heard[0][6] += 1


def _own_values_only(_: int, heard: list[list[int]]) -> None:
    heard[:] = [heard[0]] * len(heard)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_host, "the group spans hosts"),
        (_other_inode, "is another file"),
        (_other_start, "is not visible from process"),
        (_own_values_only, "only pretends to gather"),
    ],
)
def test_ranks_that_cannot_reach_each_other_use_the_back_end(
    change: Callable[[int, list[list[int]]], None], reason: str
) -> None:
    before = _mappings()

    assert all(reason in str(answer) for answer in _share(2, _Gather(2, change)))
    assert _mappings() == before


def test_when_one_rank_alone_cannot_map_all_are_told_which() -> None:
    def change(round_number: int, heard: list[list[int]]) -> None:
        if round_number == 1:
            heard[1] = [0]

    assert all("group rank(s) [1] cannot map" in str(answer) for answer in _share(2, _Gather(2, change)))


def test_ranks_that_ask_for_different_sizes_are_told_so() -> None:
    def change(_: int, heard: list[list[int]]) -> None:
        heard[1][2] = 99

    with pytest.raises(CommError, match=r"\[100, 99\] elements by group rank"):
        _share(2, _Gather(2, change))


def test_reducing_gives_every_rank_the_same_mean() -> None:
    reducers = _reducers(3)
    rows = [torch.randn(100) for _ in reducers]
    for reducer, row in zip(reducers, rows, strict=True):
        reducer.buffer.copy_(row)

    _wait_all([reducer.launch(5, 95) for reducer in reducers])

    mean = ((rows[0] + rows[1] + rows[2]) / 3)[5:95]
    for reducer, row in zip(reducers, rows, strict=True):
        assert torch.equal(reducer.buffer, torch.cat([row[:5], mean, row[95:]]))


def test_a_late_rank_is_named_when_the_time_is_over() -> None:
    first, _second = _reducers()
    work = first.launch(0, 10)

    with pytest.raises(
        CommError, match=r"rank 10: .*elements \[0, 10\) of 100 over ranks \[10, 11\] .*0\.3 s.*\[11\] to launch"
    ):
        work.wait()


def test_a_rank_that_launched_but_does_not_reduce_is_named() -> None:
    first, second = _reducers()
    work = first.launch(0, 100)
    second.launch(0, 100)

    with pytest.raises(CommError, match=r"waiting for rank\(s\) \[11\] to reduce its part"):
        work.wait()


def test_different_ranges_are_an_error_that_shows_both() -> None:
    first, second = _reducers()
    works = [first.launch(0, 10), second.launch(0, 20)]

    with pytest.raises(CommError, match=r"\[0, 10\) .*rank 11 launched \[0, 20\] as its launch number 1"):
        works[0].wait()
    with pytest.raises(CommError, match=r"\[0, 20\) .*rank 10 launched \[0, 10\] as its launch number 1"):
        works[1].wait()


def test_a_rank_that_left_is_named_before_the_time_is_over() -> None:
    first, second = _reducers(timeout_seconds=60)
    work = first.launch(0, 10)
    second.close()

    with pytest.raises(CommError, match="cannot complete: rank 11 closed its gradient reducer or ended"):
        work.wait()


def test_a_reducer_dropped_without_close_counts_as_left() -> None:
    first, second = _reducers(timeout_seconds=60)
    work = first.launch(0, 10)
    del second
    gc.collect()

    with pytest.raises(CommError, match="rank 11 closed its gradient reducer or ended"):
        work.wait()


def test_a_failure_travels_to_the_ranks_that_still_wait() -> None:
    first, second, third = _reducers(3, timeout_seconds=0.3)
    second._peers.patience = Patience(60)
    works = [first.launch(0, 10), second.launch(0, 10)]

    with pytest.raises(CommError, match=r"waiting for rank\(s\) \[12\]"):
        works[0].wait()
    third.launch(0, 10)
    with pytest.raises(CommError, match="cannot complete: rank 10 failed"):
        works[1].wait()


def test_a_rank_that_left_after_its_share_is_no_error() -> None:
    first, second = _reducers(timeout_seconds=60)
    works = [first.launch(0, 100), second.launch(0, 100)]
    _wait_all(works)
    second.close()

    works[0].wait()


def test_after_an_error_every_call_raises_it_again() -> None:
    first, _second = _reducers()
    work = first.launch(0, 10)
    with pytest.raises(CommError):
        work.wait()

    for call in (work.wait, lambda: first.launch(20, 30)):
        with pytest.raises(CommError, match=r"cannot go on after its first error: rank 10: .*\[0, 10\)"):
            call()


def test_an_interrupt_in_the_middle_is_a_failure_too() -> None:
    first, second = _reducers()
    works = [first.launch(0, 10), second.launch(0, 10)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    first._mean.write = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        works[0].wait()
    with pytest.raises(CommError, match="first error: KeyboardInterrupt"):
        works[0].wait()


@pytest.mark.parametrize("second_range", [(0, 10), (9, 12), (3, 4)])
def test_a_range_that_overlaps_one_in_flight_is_refused(second_range: tuple[int, int]) -> None:
    first, _second = _reducers()
    first.launch(0, 10)

    with pytest.raises(UsageError, match=r"\[0, 10\) is in flight"):
        first.launch(*second_range)


def test_a_range_outside_the_buffer_is_refused_and_nothing_is_launched() -> None:
    reducers = _reducers()
    with pytest.raises(ArgumentError):
        reducers[0].launch(90, 101)

    _wait_all([reducer.launch(0, 100) for reducer in reducers])


def test_a_closed_reducer_says_so_and_its_gradients_live_on() -> None:
    first, second = _reducers()
    gradient = first.buffer[:10].fill_(7)
    first.close()
    first.close()
    second.close()

    assert gradient.tolist() == [7.0] * 10
    with pytest.raises(UsageError, match="closed"):
        first.launch(0, 10)


def test_the_last_view_releases_the_memory() -> None:
    before = _mappings()
    reducers = _reducers(3)
    assert _mappings() > before
    gradient = reducers[0].buffer[:10]
    for reducer in reducers:
        reducer.close()
    del reducer, reducers
    gc.collect()
    assert _mappings() == before + 1
    del gradient
    gc.collect()
    assert _mappings() == before


def test_more_launches_than_the_board_has_slots_wait_for_the_oldest() -> None:
    count = 3 * Board.SLOTS
    reducers = _reducers(2, timeout_seconds=30, numel=count)

    def all_of(reducer: SharedMemoryReducer) -> None:
        works = [reducer.launch(index, index + 1) for index in range(count)]
        works[-1].wait()

    for rank, reducer in enumerate(reducers):
        reducer.buffer.copy_(torch.arange(count) + 2.0 * rank)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(all_of, reducers))

    assert all(torch.equal(reducer.buffer, torch.arange(count) + 1.0) for reducer in reducers)


def test_a_forked_child_does_not_leave_for_its_parent() -> None:
    reducers = _reducers(timeout_seconds=10)
    board = reducers[0]._board
    child = os.fork()
    if child == 0:
        reducers[0].close()
        os._exit(0)
    os.waitpid(child, 0)

    assert board.state(0) == Board.OPEN
    _wait_all([reducer.launch(0, 100) for reducer in reducers])
