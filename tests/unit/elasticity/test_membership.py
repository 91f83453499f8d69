"""How hosts know of each other, over a store that is a dict, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepspeed.elasticity.membership import Ended, Listener, Membership, read_ended
from deepspeed.elasticity.policy import LOST_SECONDS, MemberState


class DictStore:
    """A store in this process; `is_cut` makes every call fail."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_cut = False

    def set(self, key: str, value: str) -> None:
        self._reach()
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._reach()
        return [self.values[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)

    def _reach(self) -> None:
        if self.is_cut:
            raise RuntimeError("connection reset")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def member(clock: Clock, store: DictStore) -> Callable[[int], Membership]:
    job_store = DictStore()
    return lambda number: Membership(store, job_store, number, 3, f"node{number}", lambda: 0, clock)


def test_hosts_see_each_others_names_and_states(member: Callable[[int], Membership]) -> None:
    first, second = member(0), member(1)
    second.tell(MemberState.FINISHED)
    second.look()
    first.look()
    assert {number: (peer.host, peer.state) for number, peer in first.view().peers.items()} == {
        1: ("node1", MemberState.FINISHED)
    }
    assert first.view().hosts == {"node1"}


def test_a_host_whose_count_stands_still_is_lost_unless_it_had_finished(
    member: Callable[[int], Membership], clock: Clock
) -> None:
    first, second, third = member(0), member(1), member(2)
    third.tell(MemberState.FINISHED)
    for _ in range(8):
        third.look()
        second.look()
        first.look()
        clock.seconds += 1
        assert first.view().lost == []
    for _ in range(8):
        clock.seconds += 1
        first.look()
    assert first.view().lost == ["node1"]


def test_a_host_that_never_speaks_is_lost_too(member: Callable[[int], Membership], clock: Clock) -> None:
    first = member(0)
    first.look()
    clock.seconds += LOST_SECONDS + 1
    first.look()
    assert len(first.view().lost) == 2


def test_the_first_cause_counts_and_reaches_all(member: Callable[[int], Membership]) -> None:
    first, second = member(0), member(1)
    first.end_for_all(Ended(7, "rank 0 failed"))
    second.end_for_all(Ended(9, "rank 1 failed"))
    for each in (first, second, first):
        each.look()
    assert first.view().ended == second.view().ended == Ended(7, "rank 0 failed")
    assert first.view().has_everybody_left


def test_nobody_has_left_before_it_says_so(member: Callable[[int], Membership]) -> None:
    first, second = member(0), member(1)
    second.look()
    first.look()
    assert not first.view().has_everybody_left


def test_a_job_that_goes_on_has_no_cause(store: DictStore) -> None:
    assert read_ended(store) is None


def test_a_store_that_cannot_be_reached_is_settled_and_ends_the_thread(
    member: Callable[[int], Membership], store: DictStore
) -> None:
    store.is_cut = True
    first = member(0)
    first.start()
    first.close()
    assert first.view().fault == "RuntimeError: connection reset"


def test_what_was_told_last_is_written_when_a_host_closes(member: Callable[[int], Membership], store: DictStore) -> None:
    first, second = member(0), member(1)
    first.start()
    first.tell(MemberState.RESTARTING)
    first.close()
    second.look()
    assert second.view().peers[0].state is MemberState.RESTARTING


def test_a_listener_measures_from_the_last_change() -> None:
    listener = Listener()
    assert not listener.heard(1, 1, 0.0)
    assert not listener.heard(1, 1, LOST_SECONDS)
    assert listener.heard(1, 1, LOST_SECONDS + 0.1)
    assert not listener.heard(1, 2, LOST_SECONDS + 0.2)
