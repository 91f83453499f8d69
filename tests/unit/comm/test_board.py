"""Words that ranks share and waiting for them, without shared memory: one process writes every line."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepspeed.comm.board import Board, Peers, Progress
from deepspeed.comm.patience import Patience, ProcessIdentity
from deepspeed.errors import CommError, UsageError


def _boards(world_size: int = 2) -> list[Board]:
    words = memoryview(bytearray(Board.nbytes(world_size))).cast("q")
    return [Board(words, rank) for rank in range(world_size)]


def _peers(boards: list[Board], rank: int, progress: Progress | None = None) -> Peers:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    ranks = [10 + r for r in range(len(boards))]
    return Peers(boards[rank], [me] * len(boards), rank, ranks, Patience(0.3), "thing", progress or Progress())


class _Helper:
    def __init__(self) -> None:
        self.calls = 0

    def progress(self) -> None:
        self.calls += 1


def test_every_word_of_a_rank_is_its_own() -> None:
    first, second = _boards()
    first.launch(3, 5, 9)
    second.reduce(4)
    second.publish(5)
    first.finish(6)

    for board in (first, second):
        assert [board.launched(0), board.reduced(0), board.published(0), board.finished(0)] == [3, 0, 0, 6]
        assert [board.launched(1), board.reduced(1), board.published(1), board.finished(1)] == [0, 4, 5, 0]
        assert board.range(0, 3) == (5, 9)
        assert [board.state(0), board.state(1)] == [Board.OPEN, Board.OPEN]


def test_the_slots_of_ranges_reach_no_other_word() -> None:
    first, second = _boards()
    for number in range(1, 2 * Board.SLOTS):
        second.launch(number, -1, -1)

    assert [first.launched(0), first.reduced(1), first.published(1), first.finished(1), first.state(1)] == [0] * 5


def test_the_first_reason_to_go_stays() -> None:
    first, second = _boards()
    first.leave(Board.FAILED)
    first.leave(Board.LEFT)

    assert second.state(0) == Board.FAILED


@pytest.mark.skipif(not hasattr(os, "sched_yield"), reason="waits yield as Linux does")
def test_a_waiting_rank_helps_what_its_thread_has_built_and_a_ready_one_does_not() -> None:
    boards, progress = _boards(), Progress()
    mine, theirs = _Helper(), _Helper()
    progress.add(mine)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(progress.add, theirs).result()
    peers = _peers(boards, 0, progress)

    peers.wait(boards[0].launched, 0, lambda: "nothing", "to do anything")
    assert (mine.calls, theirs.calls) == (0, 0)
    with pytest.raises(CommError, match=r"rank 10: something over ranks \[10, 11\] did not .* rank\(s\) \[10, 11\] to move"):
        peers.wait(boards[0].launched, 1, lambda: "something", "to move")
    assert mine.calls > 1
    assert theirs.calls == 0


def test_what_is_no_longer_used_is_not_helped() -> None:
    progress, helper = Progress(), _Helper()
    progress.add(helper)
    progress.make()
    assert helper.calls == 1
    del helper
    gc.collect()

    progress.make()
    progress.add(other := _Helper())
    assert [reference() for reference, _ in progress._helpers] == [other], "it is forgotten when the next one comes"


def test_a_failure_is_kept_and_told_and_a_closed_one_says_so() -> None:
    boards = _boards()
    first, second = _peers(boards, 0), _peers(boards, 1)
    first.check_usable()
    first.failed(ValueError("the cause"))
    first.failed(ValueError("an echo"))
    assert not first.is_usable
    assert boards[1].state(0) == Board.FAILED
    with pytest.raises(CommError, match="this thing cannot go on after its first error: the cause"):
        first.check_usable()

    second.close()
    assert not second.is_usable
    assert boards[0].state(1) == Board.LEFT
    with pytest.raises(UsageError, match="this thing is closed; build a new one"):
        second.check_usable()
