"""Names, ledger and life of the watch in one process; what it does among ranks is in tests/ranks/test_watch.py."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.comm import watch
from deepspeed.comm.ledger import Channel, Ledger
from deepspeed.comm.watch import WATCH, Watch
from deepspeed.comm.world import watch_seconds
from deepspeed.errors import CommError


class _Clock:
    seconds = 50.0

    def __call__(self) -> float:
        return self.seconds


def _channel() -> Channel:
    return Channel("0", [0, 1], is_blocking=True)


def test_in_a_world_of_one_the_watch_is_off_and_names_nothing() -> None:
    before = threading.active_count()
    WATCH.start(0, 1, 5.0)
    assert not WATCH.is_on
    assert threading.active_count() == before
    with watch.naming("module 'a'"):
        assert WATCH.ledger.name == ""
    watch.late("mean", [1], 100.0)
    assert WATCH.ledger.late_seconds() == 0.0
    assert WATCH.explain([0]) == ""


def test_names_nest_and_come_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WATCH, "is_on", True)
    monkeypatch.setattr(WATCH, "ledger", Ledger(0))
    with watch.naming("outer"):
        with pytest.raises(KeyError, match="inner"), watch.naming("inner"):
            {}[WATCH.ledger.name]  # the key of the error is the name
        assert WATCH.ledger.name == "outer"
    assert WATCH.ledger.name == ""


def test_a_thread_starts_with_a_second_rank_and_ends_without_a_process_group() -> None:
    WATCH.start(0, 2, 0.04)
    thread = WATCH._thread
    assert thread is not None
    thread.join(5)  # it looks for the store of the process group, and there is none
    assert not thread.is_alive()
    WATCH.stop()
    assert not WATCH.is_on


def test_a_report_says_what_was_called_and_where_the_thread_waits() -> None:
    clock = _Clock()
    ledger, channel = Ledger(3, clock), _channel()
    ledger._messages["0"] = channel
    ledger.name, ledger.step = "module 'a'", 4
    ledger.begin(ledger.launch(channel, "all_reduce", 64))
    clock.seconds += 2
    report = ledger.report()
    assert (report.rank, report.step, report.is_waiting, report.late_seconds()) == (3, 4, True, 2.0)
    assert report.position().startswith("waits in all_reduce of 64 bytes (module 'a'), call 1 of ranks [0, 1], step 4, at ")
    assert "test_watch.py" in report.place
    ledger.end()
    later = ledger.report()
    assert later.clock > report.clock
    assert later.stamp > report.stamp
    assert not later.waits
    assert "is not in a collective" in later.position()
    assert ledger.farewell().position() == "has ended; its last call was all_reduce of 64 bytes (module 'a'), step 4"


def test_a_rank_waits_only_when_each_thread_that_ever_called_waits() -> None:
    ledger, channel = Ledger(0), _channel()
    is_launched, may_end = threading.Event(), threading.Event()

    def call() -> None:
        ledger.launch(channel, "all_reduce", 4)
        is_launched.set()
        may_end.wait()

    other = threading.Thread(target=call)
    other.start()
    is_launched.wait()
    ledger.begin(ledger.launch(channel, "all_reduce", 4))
    assert not ledger.report().is_waiting
    may_end.set()
    other.join()
    assert ledger.report().is_waiting


def test_a_late_wait_counts_while_it_is_renewed_and_is_one_wait_as_long_as_it_lasts() -> None:
    clock = _Clock()
    ledger = Ledger(0, clock)
    ledger.late("mean", [1], 0.1)
    first = ledger.report()
    clock.seconds += 1
    ledger.late("mean", [1], 1.1)
    second = ledger.report()
    assert first.clock == second.clock
    assert second.late_seconds() == pytest.approx(1.1)
    assert second.looks > first.looks
    ledger.worked()
    assert ledger.report().clock > second.clock
    ledger.late("mean", [1], 0.1)  # the same words, but begun anew
    assert ledger.report().clock > second.clock
    clock.seconds += 3
    assert not ledger.report().waits


def test_a_refused_call_is_not_counted() -> None:
    ledger, channel = Ledger(0), _channel()
    ledger.launch(channel, "all_reduce", 4)
    ledger.withdraw(ledger.launch(channel, "recv", 8))
    assert channel.launched == 1
    assert list(channel.recent) == [("all_reduce", 4, "")]


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_WATCH_SECONDS", text)
    with pytest.raises(CommError, match=f"DEEPSPEED_WATCH_SECONDS='{text}' must be a number of seconds.*or 0"):
        watch_seconds(None)


def test_the_limit_is_at_most_half_of_what_a_collective_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.delenv("DEEPSPEED_WATCH_SECONDS", raising=False)
    assert watch_seconds(None) == watch_seconds(timedelta(minutes=30)) == 3.0
    assert watch_seconds(timedelta(seconds=4)) == 2.0
    monkeypatch.setenv("DEEPSPEED_WATCH_SECONDS", "60")
    assert watch_seconds(timedelta(minutes=30)) == 60.0


class _Work:
    """A work that fails, or is over only when asked whether it is."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure
        self.is_over = False

    def is_completed(self) -> bool:
        self.is_over = True
        return True

    def wait(self, *_: Any) -> bool:
        if not self.is_over:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise self.failure
        return True


def test_a_slice_that_ends_just_when_the_work_does_is_no_failure() -> None:
    record = Ledger(0).launch(_channel(), "all_reduce", 4)
    assert WATCH.wait(record, _Work(None)) is True
    with pytest.raises(RuntimeError, match="peer closed"):
        WATCH.wait(record, _Work(RuntimeError("peer closed")))


def test_what_a_blocking_call_raises_or_returns_comes_out_of_its_thread() -> None:
    record = Ledger(0).launch(_channel(), "recv", 4)
    assert WATCH.block(record, lambda: 7) == 7

    def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        WATCH.block(record, fail)


class _Interleaved(Watch):
    """Two threads that look whether a failure was heard find out at the same time, where nothing prevents it."""

    def __init__(self, looks: threading.Barrier) -> None:
        self._looks: threading.Barrier | None = None
        super().__init__()
        self._looks = looks

    @property
    def _failure(self) -> str:
        found = self._heard
        if self._looks is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._looks.wait(0.2)
        return found

    @_failure.setter
    def _failure(self, text: str) -> None:
        self._heard = text


def test_two_threads_that_hear_of_a_failure_count_as_one_rank() -> None:
    heard: list[int] = []
    store: Any = SimpleNamespace(add=lambda _, count: heard.append(count))
    watching = _Interleaved(threading.Barrier(2))
    threads = [threading.Thread(target=watching._take_failure, args=(store, text)) for text in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [1]
    assert watching.verdict in ("one", "other")
