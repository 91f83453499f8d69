"""Reduce-scatter and all-gather in shared memory, over ranks that are threads; see `thread_ranks`."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepspeed.comm.board import Board
from deepspeed.comm.mean import MeanRule
from deepspeed.comm.patience import Patience
from deepspeed.comm.shared_shards import SharedMemoryGatherer, SharedMemoryReduceScatterer
from deepspeed.errors import ArgumentError, CommError, UsageError
from tests.unit.comm.thread_ranks import at_once, mappings, memories

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and /proc exist on Linux alone")


def _scatterers(world_size: int = 2, timeout_seconds: float = 0.3, numel: int = 120) -> list[SharedMemoryReduceScatterer]:
    ranks = [10 + r for r in range(world_size)]
    return [
        SharedMemoryReduceScatterer(memory, rank, ranks, MeanRule(world_size), torch.float32, Patience(timeout_seconds))
        for rank, memory in enumerate(memories(world_size, numel))
    ]


def _gatherers(world_size: int = 2, timeout_seconds: float = 0.3, numel: int = 120) -> list[SharedMemoryGatherer]:
    ranks = [10 + r for r in range(world_size)]
    return [
        SharedMemoryGatherer(memory, rank, ranks, Patience(timeout_seconds))
        for rank, memory in enumerate(memories(world_size, numel))
    ]


def _published(world_size: int = 2, timeout_seconds: float = 0.3) -> list[SharedMemoryGatherer]:
    gatherers = _gatherers(world_size, timeout_seconds)
    for rank, gatherer in enumerate(gatherers):
        gatherer.buffer.fill_(rank + 1)
        gatherer.publish()
    return gatherers


# -------------------------------------------------------------------- reduce-scatter


def test_each_rank_gets_its_part_and_leaves_all_other_memory_alone() -> None:
    scatterers = _scatterers(3)
    rows = [torch.randn(120) for _ in scatterers]
    for scatterer, row in zip(scatterers, rows, strict=True):
        scatterer.buffer.copy_(row)

    at_once([scatterer.launch(6, 96).wait_free for scatterer in scatterers])

    mean = (rows[0] + rows[1] + rows[2]) / 3
    for rank, (scatterer, row) in enumerate(zip(scatterers, rows, strict=True)):
        expected = row.clone()
        own = slice(6 + 30 * rank, 36 + 30 * rank)
        expected[own] = mean[own]
        assert torch.equal(scatterer.buffer, expected)


def test_a_part_is_set_or_added_in_another_dtype() -> None:
    scatterers = _scatterers(2)
    shards = [torch.full((10,), 100.0, dtype=torch.float64) for _ in scatterers]
    for rank, scatterer in enumerate(scatterers):
        scatterer.buffer.copy_(torch.arange(120.0) + rank)

    at_once([s.launch(20, 40, into).wait for s, into in zip(scatterers, shards, strict=True)])
    assert [shard.tolist() for shard in shards] == [[20.5 + e for e in range(10)], [30.5 + e for e in range(10)]]
    at_once([s.launch(0, 20, into, accumulate=True).wait for s, into in zip(scatterers, shards, strict=True)])
    assert [shard[0].item() for shard in shards] == [20.5 + 0.5, 30.5 + 10.5]


def test_the_last_rank_to_launch_reduces_at_once_and_the_others_at_their_next_launch() -> None:
    first, second = _scatterers()
    first.launch(0, 10)
    board = first._board
    second.launch(0, 10)
    assert (board.reduced(0), board.reduced(1)) == (0, 1)

    first.launch(10, 20)

    assert board.reduced(0) == 1


def test_a_part_is_there_before_others_have_theirs_but_the_range_is_not_free() -> None:
    first, second = _scatterers()
    second.launch(0, 10)
    work = first.launch(0, 10)

    work.wait()
    with pytest.raises(CommError, match=r"elements \[0, 10\) of 120 .*waiting for rank\(s\) \[11\] to reduce its part"):
        work.wait_free()


def test_waiting_for_a_free_range_goes_on_reducing_what_others_launch() -> None:
    first, second = _scatterers(timeout_seconds=30)
    second.progress = lambda: None  # type: ignore[method-assign]  # it reduces only what it waits for
    second.launch(0, 10)
    work = first.launch(0, 10)
    first.launch(10, 20)

    def second_goes_on() -> None:
        later = second.launch(10, 20)
        is_reduced = Patience(10).until(lambda: first._board.reduced(0) == 2, lambda: None)
        later.wait()  # frees the other thread
        assert is_reduced

    with ThreadPoolExecutor(1) as threads:  # a rank works for others in the thread that built its buffers: here, this one
        other = threads.submit(second_goes_on)
        work.wait_free()
        other.result()


@pytest.mark.parametrize("second_range", [(0, 10), (8, 12), (2, 4)])
def test_a_range_is_launched_again_only_when_it_is_free(second_range: tuple[int, int]) -> None:
    first, second = _scatterers(timeout_seconds=30)
    work = first.launch(0, 10)
    other = second.launch(0, 10)
    for step in (lambda: None, work.wait):
        step()
        with pytest.raises(UsageError, match=r"while other ranks may read \[0, 10\) of an older launch"):
            first.launch(*second_range)

    other.wait()
    work.wait_free()
    first.launch(*second_range)


def test_more_launches_than_the_board_has_slots_free_the_oldest() -> None:
    count = 2 * Board.SLOTS + 5
    scatterers = _scatterers(2, timeout_seconds=30, numel=2 * count)
    for rank, scatterer in enumerate(scatterers):
        scatterer.buffer.copy_(torch.arange(2.0 * count) + 2 * rank)

    def all_of(scatterer: SharedMemoryReduceScatterer) -> None:
        works = [scatterer.launch(2 * index, 2 * index + 2) for index in range(count)]
        works[-1].wait_free()

    at_once([lambda s=s: all_of(s) for s in scatterers])  # type: ignore[misc]
    assert torch.equal(scatterers[0].buffer[0::2], torch.arange(0.0, 2 * count, 2) + 1)
    assert torch.equal(scatterers[1].buffer[1::2], torch.arange(1.0, 2 * count, 2) + 1)


def test_arguments_that_do_not_fit_are_refused_and_nothing_is_launched() -> None:
    scatterers = _scatterers()
    for call in (
        lambda: scatterers[0].launch(110, 122),
        lambda: scatterers[0].launch(0, 9),
        lambda: scatterers[0].launch(0, 10, torch.zeros(4)),
        lambda: scatterers[0].launch(0, 10, accumulate=True),
    ):
        with pytest.raises(ArgumentError):
            call()

    at_once([scatterer.launch(0, 120).wait_free for scatterer in scatterers])


def test_different_ranges_are_an_error_on_both_ranks_that_shows_both() -> None:
    first, second = _scatterers()
    work = first.launch(0, 10)
    with pytest.raises(CommError, match=r"rank 11: .*\[0, 20\) .*rank 10 launched \[0, 10\] as its launch number 1"):
        second.launch(0, 20)
    with pytest.raises(CommError, match=r"rank 10: .*\[0, 10\) .*rank 11 launched \[0, 20\] as its launch number 1"):
        work.wait()


def test_a_late_rank_and_one_that_left_are_named() -> None:
    first, second = _scatterers()
    work = first.launch(0, 10)
    with pytest.raises(CommError, match=r"the reduce-scatter of gradient elements \[0, 10\) .*0\.3 s.*\[11\] to launch it"):
        work.wait()
    with pytest.raises(CommError, match="cannot complete: rank 10 failed"):
        second.launch(0, 10).wait_free()

    first, second = _scatterers(timeout_seconds=60)
    work = first.launch(0, 10)
    second.close()
    with pytest.raises(CommError, match="rank 11 closed its gradient reduce-scatterer or ended"):
        work.wait()


def test_an_interrupt_in_the_middle_ends_everything() -> None:
    first, second = _scatterers()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    first._mean.reduce = interrupt  # type: ignore[method-assign]
    second.launch(0, 10)
    with pytest.raises(KeyboardInterrupt):
        first.launch(0, 10)
    with pytest.raises(CommError, match="first error: KeyboardInterrupt"):
        first.launch(20, 30)
    with pytest.raises(CommError, match="rank 10 failed"):
        second.launch(20, 30).wait_free()


def test_a_closed_scatterer_says_so_and_its_gradients_live_on() -> None:
    first, second = _scatterers()
    work = first.launch(0, 10)
    gradient = first.buffer[:10].fill_(7)
    for _ in range(2):
        first.close()
        second.close()

    for call in (work.wait, work.wait_free, lambda: first.launch(0, 10)):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert gradient.tolist() == [7.0] * 10


def test_the_last_view_releases_the_memory() -> None:
    gc.collect()
    before = mappings()
    scatterers, gatherers = _scatterers(3), _published(3)
    at_once([scatterer.launch(0, 30).wait for scatterer in scatterers])
    gatherers[0].gather(0, 1, torch.empty(3)).wait()
    views = [scatterers[0].buffer[:10], gatherers[0].buffer[:10]]
    for user in (*scatterers, *gatherers):
        user.close()
    del scatterers, gatherers, user
    gc.collect()
    assert mappings() == before + len(views)
    views.clear()
    gc.collect()
    assert mappings() == before


# -------------------------------------------------------------------- all-gather


def test_gathering_in_place_completes_a_range_from_the_parts_of_their_owners() -> None:
    gatherers = _gatherers(3)
    whole = torch.randn(120)
    for rank, gatherer in enumerate(gatherers):
        gatherer.buffer.fill_(-1)
        own = slice(30 + 20 * rank, 50 + 20 * rank)
        gatherer.buffer[own] = whole[own]
        gatherer.publish()

    at_once([gatherer.gather_in_place(30, 90).wait for gatherer in gatherers])

    for gatherer in gatherers:
        assert torch.equal(gatherer.buffer[30:90], whole[30:90])
        assert gatherer.buffer[:30].unique().tolist() == gatherer.buffer[90:].unique().tolist() == [-1.0]


def test_a_rank_gathers_shards_alone() -> None:
    first, _second, _third = _published(3)
    into = torch.empty(15)

    first.gather(5, 10, into).wait()

    assert into.tolist() == [1.0] * 5 + [2.0] * 5 + [3.0] * 5


def test_a_gather_waits_until_all_have_published_and_names_who_has_not() -> None:
    first, second = _gatherers()
    first.publish()
    work = first.gather(0, 5, torch.empty(10))

    with pytest.raises(CommError, match=r"a gather of version 1 of 120 .* waiting for rank\(s\) \[11\] to publish it"):
        work.wait()
    with pytest.raises(CommError, match="cannot go on after its first error"):
        work.wait()
    second.publish()
    with pytest.raises(CommError, match="rank 10 failed"):
        second.begin_update()


def test_an_update_waits_until_nobody_reads_and_names_who_may() -> None:
    first, _second = _published()

    with pytest.raises(CommError, match=r"the update after version 1 of 120 .* rank\(s\) \[11\] to begin its update"):
        first.begin_update()


def test_versions_follow_each_other() -> None:
    gatherers = _published(3, timeout_seconds=30)

    def train(rank: int) -> None:
        gatherer = gatherers[rank]
        into = torch.empty(30)
        for version in range(2, 100):
            gatherer.begin_update()
            gatherer.buffer.fill_(10 * version + rank)
            gatherer.publish()
            gatherer.gather(40, 50, into).wait()
            assert into.view(3, 10).unique(dim=1).flatten().tolist() == [10.0 * version + r for r in range(3)]

    at_once([lambda r=r: train(r) for r in range(3)])  # type: ignore[misc]


def test_an_update_completes_gathers_that_were_started_and_forgets_those_that_were_dropped() -> None:
    first, second = _published(timeout_seconds=30)
    kept, dropped = torch.zeros(10), torch.zeros(10)
    work = first.gather(0, 5, kept)
    first.gather(0, 5, dropped)

    at_once([first.begin_update, second.begin_update])
    second.buffer.fill_(9)
    work.wait()

    assert kept.tolist() == [1.0] * 5 + [2.0] * 5
    assert dropped.tolist() == [0.0] * 10


def test_gathering_and_publishing_come_in_turns() -> None:
    first, second = _gatherers(timeout_seconds=30)
    first.begin_update()  # nothing is published: nobody is waited for
    for gather in (lambda: first.gather(0, 5, torch.empty(10)), lambda: first.gather_in_place(0, 10)):
        with pytest.raises(UsageError, match="version 1 of the buffer is being written"):
            gather()
    first.publish()
    with pytest.raises(UsageError, match="version 1 is published"):
        first.publish()
    second.publish()
    at_once([first.begin_update, second.begin_update])
    first.begin_update()
    with pytest.raises(UsageError, match="version 2 of the buffer is being written"):
        first.gather(0, 5, torch.empty(10))


def test_arguments_of_gathers_are_checked() -> None:
    first, _second = _published()
    for call in (
        lambda: first.gather_in_place(0, 9),
        lambda: first.gather_in_place(0, 122),
        lambda: first.gather(0, 5, torch.empty(9)),
        lambda: first.gather(0, 5, torch.empty(10, dtype=torch.float64)),
        lambda: first.gather(118, 123, torch.empty(10)),
    ):
        with pytest.raises(ArgumentError):
            call()


def test_a_rank_that_left_after_publishing_can_still_be_read_but_not_waited_for() -> None:
    first, second = _published(timeout_seconds=60)
    second.close()
    second.close()
    into = torch.empty(10)

    first.gather(0, 5, into).wait()

    assert into.tolist() == [1.0] * 5 + [2.0] * 5
    with pytest.raises(CommError, match="rank 11 closed its parameter gatherer or ended"):
        first.begin_update()
    for call in (second.publish, second.begin_update, lambda: second.gather_in_place(0, 10)):
        with pytest.raises(UsageError, match="this parameter gatherer is closed"):
            call()
