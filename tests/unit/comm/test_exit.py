"""The exit waits for threads that are at work, and only for those."""

from __future__ import annotations

import threading
import time

from deepspeed.comm.exit import settle_threads


def _work(seconds: float, done: threading.Event) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
    done.set()


def test_it_returns_after_a_thread_at_work_has_finished() -> None:
    done = threading.Event()
    thread = threading.Thread(target=_work, args=(0.1, done))
    thread.start()
    assert settle_threads(limit_seconds=30)
    assert done.is_set()
    thread.join()


def test_threads_that_wait_do_not_hold_it_up() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    assert settle_threads(limit_seconds=30)
    go.set()
    thread.join()


def test_a_thread_that_never_rests_holds_it_up_for_the_limit_only() -> None:
    done = threading.Event()
    thread = threading.Thread(target=_work, args=(1.0, done))
    thread.start()
    assert not settle_threads(limit_seconds=0.1)
    assert not done.is_set()
    thread.join()
