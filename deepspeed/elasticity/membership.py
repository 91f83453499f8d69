"""How the hosts of one round know of each other: each counts up a key in the round's store, and looks at the others'.

```
   thread, once a second:   store["member/<own>"] = count, state, host     what the others see of this host
                            store["member/*"] ---------------------------> who is silent, who has finished, who restarts
                            job's store["ended"] ------------------------> somebody gave up, and why
                            rendezvous ----------------------------------> how many hosts wait
   main thread:             .view()                                        the newest of these, and how old it is
```

Silence is measured by the looker's own clock, as long as a count does not change. All talk with the store is in the thread:
where the network is cut a call may not come back, and then the age of the view tells it.

Does not live here: what follows from it (`policy`), the rendezvous (torch's). Used by `elastic_agent`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from deepspeed.common.logging import get_logger
from deepspeed.elasticity.policy import LOST_SECONDS, MemberState

__all__ = ["BEAT_SECONDS", "Ended", "Listener", "Membership", "Peer", "Store", "View", "read_ended"]

logger = get_logger(__name__)

BEAT_SECONDS = 1.0
_WENT_WELL = (MemberState.FINISHED, MemberState.LEFT)


class Store(Protocol):
    """The part of torch's stores that is used."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read values; blocks until all are there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


class Peer(NamedTuple):
    """Another host, as its last word tells."""

    state: MemberState
    host: str
    is_silent: bool


class Ended(NamedTuple):
    """Why the job is over."""

    status: int
    text: str


@dataclass(frozen=True)
class View:
    """What was last seen."""

    at_seconds: float
    peers: dict[int, Peer] = field(default_factory=dict)
    """By number in the round; those that have not said anything yet are not in it."""
    waiting: int = 0
    ended: Ended | None = None
    fault: str = ""
    """Why the store cannot be reached; empty when it can."""

    @property
    def hosts(self) -> frozenset[str]:
        """Names of the other hosts."""
        return frozenset(peer.host for peer in self.peers.values())

    @property
    def lost(self) -> list[str]:
        """Names of hosts that are silent and had not finished."""
        return [peer.host for peer in self.peers.values() if peer.is_silent and peer.state not in _WENT_WELL]

    @property
    def has_everybody_left(self) -> bool:
        """Whether all others know that the job is over, or are gone."""
        return all(peer.is_silent or peer.state is MemberState.LEFT for peer in self.peers.values())


class Listener:
    """Judges silence from counts: pure but for the times it is given."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}

    def heard(self, number: int, count: int, now_seconds: float) -> bool:
        """Whether host `number`, whose count is `count` now, has been silent for too long."""
        known = self._last.get(number)
        if known is None or known[0] != count:
            self._last[number] = (count, now_seconds)
            return False
        return now_seconds - known[1] > LOST_SECONDS


class Membership:
    """One host's part in one round, from `start` to `close`."""

    def __init__(
        self,
        store: Store,
        job_store: Store,
        number: int,
        size: int,
        host: str,
        waiting: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the parts.

        Args:
            store: of this round alone.
            job_store: of the whole job.
            number: this host's among those of the round.
            size: hosts of the round.
            host: name of this one.
            waiting: how many hosts wait for the next round; may block.
            clock: seconds.
        """
        self._store, self._job_store, self._number, self._host = store, job_store, number, host
        self._waiting, self._clock = waiting, clock
        self.size = size
        self._ended: Ended | None = None
        self._others = [other for other in range(size) if other != number]
        self._listener = Listener()
        self._count = 0
        self._state = MemberState.RUNNING
        self._view = View(clock())
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="elastic-membership", daemon=True)

    def start(self) -> None:
        """Say that this host is there, and begin to look at the others."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless a call of the store holds it; a last word that was told is on its way."""
        self._is_over = True
        self._wake.set()
        self._thread.join(timeout=BEAT_SECONDS)

    def tell(self, state: MemberState) -> None:
        """Let the others know, at once."""
        self._state = state
        self._wake.set()

    def end_for_all(self, ended: Ended) -> None:
        """Let all hosts know that the job is over, those of later rounds included."""
        self._ended = ended
        self.tell(MemberState.LEFT)

    def view(self) -> View:
        """The newest view."""
        return self._view

    def seconds_old(self) -> float:
        """Age of the newest view."""
        return self._clock() - self._view.at_seconds

    def _run(self) -> None:
        while True:
            is_over = self._is_over
            try:
                self.look()
            except Exception as error:  # whatever a store raises: the main thread ends the host's part in the job
                logger.debug("the store cannot be reached: %s", error, exc_info=True)
                self._view = View(self._view.at_seconds, fault=f"{type(error).__name__}: {error}")
                return
            if is_over:
                return
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()

    def look(self) -> None:
        """One beat: say where this host stands, and look at all others."""
        self._count += 1
        word = json.dumps({"count": self._count, "state": self._state.value, "host": self._host})
        if self._ended is not None and read_ended(self._job_store) is None:  # the first cause counts
            self._job_store.set(_ENDED, json.dumps(self._ended._asdict()))
        self._store.set(_key(self._number), word)
        there = [other for other in self._others if other in self._view.peers or self._store.check([_key(other)])]
        words = self._store.multi_get([_key(other) for other in there]) if there else []
        now = self._clock()
        peers = {other: self._peer(other, json.loads(said), now) for other, said in zip(there, words, strict=True)}
        absent = [other for other in self._others if other not in peers and self._listener.heard(other, 0, now)]
        peers |= {other: Peer(MemberState.RUNNING, f"number {other}, which never spoke", True) for other in absent}
        self._view = View(now, peers, self._waiting(), read_ended(self._job_store))

    def _peer(self, number: int, said: dict[str, str], now_seconds: float) -> Peer:
        is_silent = self._listener.heard(number, int(said["count"]), now_seconds)
        return Peer(MemberState(said["state"]), said["host"], is_silent)


def read_ended(job_store: Store) -> Ended | None:
    """Why the job is over, if it is. May raise what the store raises."""
    if not job_store.check([_ENDED]):
        return None
    return Ended(**json.loads(job_store.multi_get([_ENDED])[0]))


_ENDED = "deepspeed/ended"


def _key(number: int) -> str:
    return f"member/{number}"
