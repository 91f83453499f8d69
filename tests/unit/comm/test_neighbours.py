from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from deepspeed.comm.neighbours import Neighbours
from deepspeed.comm.patience import ProcessIdentity


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def _with_rank_1(process: subprocess.Popen[bytes], clock: Clock) -> Neighbours:
    """Rank 0 in this process knows `process` as rank 1."""
    store, mine = HashStore(), Neighbours(0, clock)
    mine.introduce(store)
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    store.set(f"{mine._key} {store.add(mine._key, 1)}", f"1 {identity.pid} {identity.start_ticks}")
    mine.learn(store)
    return mine


def _looks(neighbours: Neighbours, clock: Clock, seconds: float, every: float = 0.5) -> str:
    text = ""
    end = clock.seconds + seconds
    while clock.seconds < end:
        clock.seconds += every
        text = neighbours.stopped(4)
    return text


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_stopped_rank_is_settled_after_some_seconds_and_no_more_once_it_goes_on(child: subprocess.Popen[bytes]) -> None:
    clock = Clock()
    neighbours = _with_rank_1(child, clock)
    assert _looks(neighbours, clock, 10) == ""
    _stop(child)
    assert _looks(neighbours, clock, 4) == ""
    assert f"rank 1 (process {child.pid}) of this host is stopped by a signal" in _looks(neighbours, clock, 1)
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
    assert _looks(neighbours, clock, 1) == ""


def test_a_pause_of_the_looking_rank_starts_the_count_anew(child: subprocess.Popen[bytes]) -> None:
    clock = Clock()
    neighbours = _with_rank_1(child, clock)
    _stop(child)
    assert _looks(neighbours, clock, 3) == ""
    clock.seconds += 60  # this rank was stopped too
    assert _looks(neighbours, clock, 3) == ""
    assert _looks(neighbours, clock, 2) != ""


def test_a_dead_rank_is_known_and_only_among_those_asked_about(child: subprocess.Popen[bytes]) -> None:
    neighbours = _with_rank_1(child, Clock())
    assert neighbours.dead([0, 1, 2]) == []
    child.kill()
    child.communicate()
    assert neighbours.dead([0, 1, 2]) == [1]
    assert neighbours.dead([0, 2]) == []


def test_ranks_that_share_memory_are_known_without_the_store(child: subprocess.Popen[bytes]) -> None:
    clock = Clock()
    neighbours = Neighbours(0, clock)
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None
    neighbours.know({1: identity})
    _stop(child)
    assert f"rank 1 (process {child.pid})" in _looks(neighbours, clock, 5)
