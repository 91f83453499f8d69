"""Sums over the calls of this process: how often, how many bytes, how long, and for how long they blocked it.

    collectives     a call, from its start to the end of its `wait`     --> METER.ops
                    the blocking call itself, or the `wait` alone       --> METER.waited_seconds
    shared memory   the same of launches and gathers; waits on a board  --> both

Unlike the log (`recorder`) it keeps no list, and does not wait for devices: there the time of a call is the host's, and one
that only enters a queue blocks nobody. `engine.step_log` switches it on, and reads differences of sums.

Lives here: the sums. Does not live here: timing a call (`collectives`, `algorithms`, `board`, which ask `METER.is_on`).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["METER", "Meter", "OpSums"]


class OpSums(NamedTuple):
    """Of one operation."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Meter:
    """The sums of one process, from when it was first switched on.

    Attributes:
        is_on: whether somebody reads; tested once per call.
        waited_seconds: that calls blocked threads of this process.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.waited_seconds = 0.0
        self._ops: dict[str, OpSums] = {}
        self._readers = 0

    def begin(self) -> None:
        """Somebody begins to read."""
        self._readers += 1
        self.is_on = True

    def end(self) -> None:
        """Somebody who called `begin` reads no more."""
        self._readers -= 1
        self.is_on = self._readers > 0

    def add(self, operation: str, nbytes: int, seconds: float) -> None:
        """Count one finished call."""
        calls, before_nbytes, before_seconds = self._ops.get(operation, _NONE)
        self._ops[operation] = OpSums(calls + 1, before_nbytes + nbytes, before_seconds + seconds)

    def ops(self) -> dict[str, OpSums]:
        """The sums so far, by operation."""
        return dict(self._ops)

    def waited(self, seconds: float) -> None:
        """This process was blocked for so long."""
        self.waited_seconds += seconds


_NONE = OpSums()

METER = Meter()
"""The sums of this process."""
