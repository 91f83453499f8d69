"""The other ranks of this host, as the kernel sees them: has one died, has a signal stopped one?

    every rank --(machine, rank, process)--> the group's store --> who is here --> /proc/<pid>/stat, while one waits
    ranks that share memory know each other's processes from the start ---^

A rank that is slow cannot be told from one that never comes; one that the kernel has stopped can, where its process can be
seen. What stops all ranks for a while (a suspended job, a paused container) is no fault: a look that comes late itself
starts the count anew.

Lives here: the processes and the count. Does not live here: when to look and what to do (`comm.watch`, which calls this).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from deepspeed.comm.patience import ProcessIdentity, known_host_identity

__all__ = ["Neighbours"]

_LOOK_SECONDS = 0.5
_LATE_LOOK_SECONDS = 2.0


class _Store(Protocol):
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...


class Neighbours:
    """Processes of ranks on this machine, this one left out. Any thread may ask; one introduces, one learns."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody is known yet; the clock is a parameter for tests."""
        self._rank = rank
        self._clock = clock
        self._known: dict[int, ProcessIdentity] = {}
        self._learned = 0
        self._stopped_since: dict[int, float] = {}
        self._looked = float("-inf")
        self._key = f"machine {hashlib.blake2b(known_host_identity().encode(), digest_size=8).hexdigest()}"

    def introduce(self, store: _Store) -> None:
        """Say that this process is on this machine. Once per rank."""
        me = ProcessIdentity.of(os.getpid())
        if me is not None and known_host_identity():
            store.set(f"{self._key} {store.add(self._key, 1)}", f"{self._rank} {me.pid} {me.start_ticks}")

    def learn(self, store: _Store) -> None:
        """Take in who has introduced itself since."""
        if not known_host_identity():
            return
        for number in range(self._learned + 1, store.add(self._key, 0) + 1):
            rank, pid, ticks = map(int, store.get(f"{self._key} {number}").split())
            self.know({rank: ProcessIdentity(pid, ticks)})
            self._learned = number

    def know(self, processes: Mapping[int, ProcessIdentity]) -> None:
        """Take in ranks of this machine that somebody else knows: a store may be stopped before it has told all."""
        self._known.update(processes)

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose process is known to be gone."""
        known = self._known.copy()
        return [rank for rank in ranks if rank != self._rank and rank in known and not known[rank].is_alive()]

    def stopped(self, at_least_seconds: float) -> str:
        """Which ranks a signal has stopped for so long, in words; empty when there is none. Looks twice a second."""
        now = self._clock()
        if now - self._looked >= _LOOK_SECONDS:
            if now - self._looked > _LATE_LOOK_SECONDS:
                self._stopped_since.clear()
            self._looked = now
            known = self._known.copy()
            stopped = [rank for rank, process in known.items() if rank != self._rank and process.is_stopped()]
            self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        long = {rank: now - since for rank, since in self._stopped_since.items() if now - since >= at_least_seconds}
        if not long:
            return ""
        parts = [f"rank {rank} (process {self._known[rank].pid})" for rank in sorted(long)]
        return (
            f"{', '.join(parts)} of this host {'is' if len(long) == 1 else 'are'} stopped by a signal (SIGSTOP or SIGTSTP) "
            f"since {max(long.values()):.0f} s and will do nothing until SIGCONT. Find out who sent it (a terminal, a "
            "batch system, a debugger), and start the job again from its last checkpoint."
        )
