"""The protocol in one process: several ranks' meetings over one store, looked at in any order."""

from __future__ import annotations

from dataclasses import replace

from torch._C._distributed_c10d import HashStore

from deepspeed.comm.divergence import Call, ChannelReport, RankReport, WaitReport
from deepspeed.comm.meeting import Meeting

LIMIT_SECONDS = 4.0


class _Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class _CountingStore:
    """A store that counts requests."""

    def __init__(self) -> None:
        self.requests = 0
        self._store = HashStore()

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        self.requests += 1
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return self._store.check(keys)


class _Rank:
    """What a rank would report; `waits_for` None: in user code."""

    def __init__(self, rank: int, world_size: int, clock: _Clock) -> None:
        self.rank = rank
        self.waits_for: tuple[int, ...] | None = None
        self.since = 0.0
        self.calls = 0
        self._clock = clock
        self._stamp = 0
        self.meeting = Meeting(rank, world_size, LIMIT_SECONDS, self.report, self.late_seconds, clock)

    def wait(self, *ranks: int) -> None:
        self.waits_for, self.since = ranks, self._clock.seconds
        self.calls += 1

    def go_on(self) -> None:
        self.waits_for = None
        self.calls += 1

    def late_seconds(self) -> float:
        return 0.0 if self.waits_for is None else self._clock.seconds - self.since

    def report(self) -> RankReport:
        self._stamp += 1
        report = RankReport(self.rank, self.calls, self._stamp, self._stamp, channels={"a": ChannelReport((), 0, ())})
        if self.waits_for is None:
            return report
        wait = WaitReport(Call(f"call {self.calls}"), "", 0, self.waits_for, self.late_seconds())
        return replace(report, waits=(wait,), is_waiting=True)


def _world(size: int) -> tuple[_Clock, _CountingStore, list[_Rank]]:
    clock = _Clock()
    return clock, _CountingStore(), [_Rank(rank, size, clock) for rank in range(size)]


def _look(clock: _Clock, store: _CountingStore, ranks: list[_Rank], times: int, seconds: float = 0.5) -> None:
    for _ in range(times):
        clock.seconds += seconds
        for rank in ranks:
            rank.meeting.look(store)


def test_while_nobody_is_late_a_look_is_one_request() -> None:
    clock, store, ranks = _world(3)
    ranks[0].wait(1)
    _look(clock, store, ranks, times=5)
    assert store.requests == 3 * 5
    assert not any(rank.meeting.is_open for rank in ranks)


def test_all_ranks_hear_the_verdict_and_rank_0_last() -> None:
    clock, store, ranks = _world(3)
    ranks[0].wait(1)
    ranks[1].wait(0)
    heard: list[int] = []
    for _ in range(40):
        _look(clock, store, ranks, times=1)
        heard += [rank.rank for rank in ranks if rank.meeting.verdict and rank.rank not in heard]
    assert sorted(heard) == [0, 1, 2]
    assert heard[-1] == 0
    assert len({rank.meeting.verdict for rank in ranks}) == 1
    assert "rank 0 waits in call 1 for rank(s) [1]; rank 1 waits in call 1 for rank(s) [0]" in ranks[2].meeting.verdict


def test_rank_0_does_not_wait_for_ever_for_a_rank_that_does_not_hear() -> None:
    clock, store, ranks = _world(3)
    ranks[0].wait(1)
    ranks[1].wait(0)
    _look(clock, store, ranks[:2], times=40)
    assert ranks[0].meeting.verdict
    assert ranks[1].meeting.verdict


def test_a_meeting_about_a_slow_rank_ends_and_another_can_follow() -> None:
    clock, store, ranks = _world(2)
    for round_number in range(3):
        ranks[0].wait(1)
        _look(clock, store, ranks, times=20)
        assert all(rank.meeting.is_open for rank in ranks), round_number
        ranks[0].go_on()
        _look(clock, store, ranks, times=10)
        assert not any(rank.meeting.is_open or rank.meeting.verdict for rank in ranks), round_number
        before = store.requests
        _look(clock, store, ranks, times=1)
        assert store.requests - before == 2


def test_reports_of_an_earlier_meeting_are_not_read_but_the_end_of_a_rank_is() -> None:
    clock, store, ranks = _world(2)
    ranks[0].wait(1)
    _look(clock, store, ranks, times=20)
    assert set(ranks[0].meeting.read(store, [0, 1])) == {0, 1}
    ranks[0].go_on()
    _look(clock, store, ranks, times=10)
    assert ranks[0].meeting.read(store, [0, 1]) == {}
    ranks[1].meeting.leave(store, replace(ranks[1].report(), has_ended=True))
    assert ranks[0].meeting.read(store, [0, 1])[1].has_ended


def test_looks_come_less_often_while_a_meeting_lasts_and_in_a_large_world() -> None:
    clock, store, ranks = _world(2)
    meeting = ranks[0].meeting
    assert meeting.pause_seconds == LIMIT_SECONDS / 4
    ranks[0].wait(1)
    _look(clock, store, ranks, times=9)
    quick = meeting.pause_seconds
    assert meeting.is_open
    assert quick < LIMIT_SECONDS / 4
    _look(clock, store, ranks, times=30)
    assert meeting.pause_seconds == LIMIT_SECONDS / 4
    assert _Rank(5, 2000, clock).meeting.pause_seconds == 10.0
