"""Ranks as threads of one process, so that properties over several ranks run by the hundred without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deepspeed.checkpoint.agreement import Alone

_TIMEOUT_SECONDS = 30


class _Meeting:
    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=_TIMEOUT_SECONDS)
        self.payloads: list[bytes] = [b""] * world_size


class ThreadRanks:
    """The protocol `agreement.Ranks` over a barrier and a list."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self._meeting = meeting

    def gather(self, payload: bytes) -> list[bytes]:
        self._meeting.payloads[self.rank] = payload
        self._meeting.barrier.wait()
        gathered = list(self._meeting.payloads) if self.rank == 0 else []
        self._meeting.barrier.wait()
        return gathered

    def broadcast(self, payload: bytes) -> bytes:
        return self.gather_all(payload)[0]

    def gather_all(self, payload: bytes) -> list[bytes]:
        self._meeting.payloads[self.rank] = payload
        self._meeting.barrier.wait()
        gathered = list(self._meeting.payloads)
        self._meeting.barrier.wait()
        return gathered


def run_threads(world_size: int, fn: Callable[[ThreadRanks], Any]) -> list[Any]:
    """`fn(ranks)` on every rank; each result, or the exception that the rank raised, in rank order."""
    meeting = _Meeting(world_size)

    def attempt(rank: int) -> Any:
        try:
            return fn(ThreadRanks(rank, world_size, meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(attempt, range(world_size)))


def use_thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the `group` that is handed to the room's functions be the ranks themselves; without one it is a single process."""
    for module in ("deepspeed.checkpoint.opening", "deepspeed.checkpoint.tag_agreement", "tests.support.checkpoints"):
        monkeypatch.setattr(f"{module}.ranks_of", lambda rank, world_size, group=None: group or Alone())
