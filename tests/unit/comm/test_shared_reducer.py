"""The mean in place, over ranks that are threads; see `thread_ranks`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspeed.comm.board import Board
from deepspeed.comm.mean import MeanRule
from deepspeed.comm.patience import Patience
from deepspeed.comm.shared_reducer import SharedMemoryReducer
from deepspeed.errors import ArgumentError, CommError, UsageError
from tests.unit.comm.thread_ranks import at_once, mappings, memories

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc exist on Linux alone")


def _reducers(world_size: int = 2, timeout_seconds: float = 0.3, numel: int = 100) -> list[SharedMemoryReducer]:
    ranks = [10 + r for r in range(world_size)]
    return [
        SharedMemoryReducer(memory, rank, ranks, MeanRule(world_size), torch.float32, Patience(timeout_seconds))
        for rank, memory in enumerate(memories(world_size, numel))
    ]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    fds = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_reducing_gives_every_rank_the_same_mean() -> None:
    reducers = _reducers(3)
    rows = [torch.randn(100) for _ in reducers]
    for reducer, row in zip(reducers, rows, strict=True):
        reducer.buffer.copy_(row)

    at_once([reducer.launch(5, 95).wait for reducer in reducers])

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
    at_once([work.wait for work in works])
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

    at_once([reducer.launch(0, 100).wait for reducer in reducers])


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
    before = mappings()
    reducers = _reducers(3)
    assert mappings() > before
    gradient = reducers[0].buffer[:10]
    for reducer in reducers:
        reducer.close()
    del reducer, reducers
    gc.collect()
    assert mappings() == before + 1
    del gradient
    gc.collect()
    assert mappings() == before


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
    at_once([reducer.launch(0, 100).wait for reducer in reducers])
