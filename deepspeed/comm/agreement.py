"""Ranks agree through the store on what their next call is, before they make it.

    each rank, in a helper thread   "call n is ..."  -->  the first word counts; the last rank that agrees says go

Lives here: one agreement. Does not live here: which calls need one and how long to wait (`comm.watch`, which calls this).
"""

from __future__ import annotations

import threading
from time import sleep
from typing import Protocol

from deepspeed.common.logging import get_logger

__all__ = ["Agreement"]

logger = get_logger(__name__)

_FIRST_PAUSE_SECONDS = 0.5e-3
_LAST_PAUSE_SECONDS = 20e-3


class _Store(Protocol):
    def set(self, key: str, value: str) -> None: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


class Agreement:
    """One call that the ranks of a group agree on.

    Attributes:
        first: what the first rank said; empty while it is not known.
        is_over: set when all said the same, or the store does not answer any more (the call itself will then tell).
        is_cancelled: the helper thread is to end.
    """

    def __init__(self, store: _Store, key: str, mine: str, world_size: int) -> None:
        """Store the parts.

        Args:
            store: that the ranks share.
            key: of the agreement, the same on all of them.
            mine: what this rank is about to do.
            world_size: ranks that must agree.
        """
        self.first = ""
        self.is_over = threading.Event()
        self.is_cancelled = False
        self._store = store
        self._key = key
        self._mine = mine
        self._world_size = world_size

    def start(self) -> None:
        """Ask, in a thread of its own."""
        threading.Thread(target=self._body, name="deepspeed agreement", daemon=True).start()

    def _body(self) -> None:
        try:
            self._ask()
        except RuntimeError as error:
            logger.debug("no agreement on %s: %s", self._mine, error)
        self.is_over.set()

    def _ask(self) -> None:
        first = self._store.compare_set(f"call {self._key}", "", self._mine).decode()
        self.first = first
        if first == self._mine and self._store.add(f"ready {self._key}", 1) == self._world_size:
            self._store.set(f"go {self._key}", "")
            return
        pause = _FIRST_PAUSE_SECONDS
        while not self.is_cancelled and not self._store.check([f"go {self._key}"]):
            sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
