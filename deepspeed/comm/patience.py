"""Waiting for other processes of this host: without burning a core, without missing that one of them died.

Lives here: `Patience` (how to wait for a condition that another process makes true), `ProcessIdentity` (is that process
still the one we knew, and does it run?) and `host_identity`. Does not live here: what is waited for. `comm.shared_memory`,
`comm.neighbours` and `comm.rendezvous` call it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Patience", "ProcessIdentity", "host_identity", "host_name", "known_host_identity"]

_SPINS = 64
_YIELD_SECONDS = 1e-3
_LONGEST_SLEEP_SECONDS = 1e-3
_LOOK_SECONDS = 0.1


class ProcessIdentity(NamedTuple):
    """A process of this host: its id and when it started, in clock ticks since boot, since ids are used again.

    Source of the fields: proc(5), /proc/pid/stat.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a living process, None when there is none of that id. A zombie counts as dead."""
        fields = _stat_fields(pid)
        return None if not fields or fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        """Whether this very process still runs (stopped counts as running)."""
        return self.of(self.pid) == self

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, SIGTSTP) has stopped this very process; one that a debugger holds is not."""
        fields = _stat_fields(self.pid)
        return bool(fields) and fields[0] == b"T" and int(fields[19]) == self.start_ticks


def _stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/pid/stat after the name; empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # no such process, gone between open and read, or hidden from us: not to be relied on either way
        return []
    return text[text.rindex(b")") + 2 :].split()  # the name before it may contain blanks and brackets


def host_identity() -> str:
    """What tells hosts and containers apart: name, boot and process-id namespace.

    Raises:
        OSError: /proc does not say it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def known_host_identity() -> str:
    """The same; empty where /proc does not say it."""
    try:
        return host_identity()
    except OSError:
        return ""


def host_name() -> str:
    """The same; where /proc does not say it, the name in the network."""
    return known_host_identity() or socket.gethostname()


class Patience:
    """Wait for a condition that another process makes true: spin, then yield, then sleep in growing steps.

    The first look costs less than a microsecond, which serves ranks that are in step; ranks that share cores give theirs
    away after some ten microseconds; a rank that waits long sleeps a tenth of the time it has waited, at most a millisecond.
    """

    def __init__(
        self,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        """Store the limit; clock, sleep and yield are parameters for tests."""
        self.timeout_seconds = timeout_seconds
        self._clock = clock
        self._sleep = sleep
        self._give_way = give_way or os.sched_yield

    def until(self, is_ready: Callable[[], bool], look: Callable[[], None]) -> bool:
        """Return True once `is_ready()`, or False when the time is over.

        `look()` is called now and then while nothing happens; it may raise to end the wait.
        """
        for _ in range(_SPINS):
            if is_ready():
                return True
        began = self._clock()
        next_look = _LOOK_SECONDS
        while not is_ready():
            waited = self._clock() - began
            if waited >= self.timeout_seconds:
                return False
            if waited >= next_look:
                look()
                next_look = waited + _LOOK_SECONDS
            elif waited < _YIELD_SECONDS:
                self._give_way()
            else:
                self._sleep(min(_LONGEST_SLEEP_SECONDS, waited / 10))
        return True
