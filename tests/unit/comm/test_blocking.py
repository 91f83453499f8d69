"""`comm.blocking`: calls in other threads, and the threads kept for the next call."""

from __future__ import annotations

import os
import threading

import pytest

from deepspeed.comm import blocking
from deepspeed.comm.blocking import dismiss, lend


def test_the_next_call_is_made_by_the_same_thread() -> None:
    names = {lend(threading.get_ident).get(timeout=5).result() for _ in range(5)}
    assert len(names) == 1
    assert threading.get_ident() not in names


def test_a_call_that_does_not_end_does_not_hold_up_the_next() -> None:
    release = threading.Event()
    stuck = lend(release.wait)
    assert lend(lambda: 7).get(timeout=5).result() == 7
    assert stuck.empty()
    release.set()
    assert stuck.get(timeout=5).result() is True


def test_what_a_call_raises_is_raised_by_its_result() -> None:
    def fail() -> None:
        raise KeyError("inside")

    outcome = lend(fail).get(timeout=5)
    with pytest.raises(KeyError, match="inside"):
        outcome.result()


def test_a_forked_child_has_threads_of_its_own() -> None:
    lend(int).get(timeout=5)
    assert blocking._idle
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = lend(lambda: 0).get(timeout=5).result()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_threads_that_wait_for_a_call_can_be_dismissed() -> None:
    number = lend(threading.get_ident).get(timeout=5).result()
    dismiss()
    assert not blocking._idle
    for thread in threading.enumerate():
        if thread.ident == number:
            thread.join(5)
            assert not thread.is_alive()
