"""A thread behind the caller."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from deepspeed.common.worker import Worker, thread_share
from deepspeed.errors import UsageError


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("test worker")
    yield worker
    worker.close()


def test_work_runs_in_another_thread_and_in_order(worker: Worker) -> None:
    done: list[tuple[int, str]] = []
    for number in range(5):
        worker.submit(lambda number=number: done.append((number, threading.current_thread().name)))  # type: ignore[misc]
    worker.join()
    assert done == [(number, "test worker") for number in range(5)]


def test_the_caller_goes_on_while_work_runs(worker: Worker) -> None:
    may_end, went_on = threading.Event(), []
    worker.submit(may_end.wait)
    assert not worker.is_idle
    went_on.append(True)
    may_end.set()
    worker.join()
    assert worker.is_idle
    assert went_on


def test_an_error_comes_out_where_somebody_waits_once_and_stops_what_follows(worker: Worker) -> None:
    done = []

    def fail() -> None:
        raise ValueError("broken in the thread")

    worker.submit(fail)
    worker.submit(lambda: done.append(1))
    with pytest.raises(ValueError, match="broken in the thread"):
        worker.join()
    assert not worker.has_failed
    assert done == []
    worker.submit(lambda: done.append(2))
    worker.join()
    assert done == [2]


def test_the_thread_has_its_own_number_of_torch_threads() -> None:
    before = torch.get_num_threads()
    worker = Worker("test worker", threads=before + 1)
    seen: list[int] = []
    try:
        worker.submit(lambda: seen.append(torch.get_num_threads()))
        worker.join()
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        worker.close()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
    assert later == [before]


def test_close_waits_and_ends_the_thread(worker: Worker) -> None:
    done: list[int] = []
    worker.submit(lambda: done.append(1))
    worker.close()
    assert done == [1]
    assert "test worker" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(UsageError, match="after close"):
        worker.submit(lambda: None)
    worker.join()


def test_a_share_of_the_threads_is_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [thread_share(share) for share in (0.0, 0.1, 0.5, 0.99, 1.0)] == [1, 1, 4, 7, 8]


def test_the_thread_ends_with_its_worker() -> None:
    worker = Worker("forgotten worker")
    worker.submit(lambda: None)
    worker.join()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "forgotten worker"]
    del worker
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
