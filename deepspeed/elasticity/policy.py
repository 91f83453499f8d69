"""What a host of an elastic job does next, decided from what is known: pure, without torch, processes or clocks.

```
            --- the others are there ---> RUNNING --- ranks ended with 0 ---> FINISHED --- all hosts have ---> done
    joining                                 |                                    |
       ^                                    | own ranks failed, attempts left    |
       |                                    | a host is lost, restarts, or waits | a host is lost, or restarts
       '------------------------------------+------------------------------------'
                                            '--- no attempt left: give up; the others end too
```

Does not live here: who does it (`elastic_agent`), how hosts learn of each other (`membership`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["CALM_SECONDS", "CUT_OFF_SECONDS", "LOST_SECONDS", "Action", "Attempts", "MemberState", "Seen", "decide"]

LOST_SECONDS = 5.0
"""A host that is silent for so long is lost."""

CUT_OFF_SECONDS = 7.0
"""A host that has not reached the store for so long gives itself up; by then the others have."""

CALM_SECONDS = 600.0
"""A run of so long starts the count of failures anew."""


class MemberState(str, Enum):
    """What a host tells the others."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    RESTARTING = "restarting"
    LEFT = "left"
    """It knows that the job is over."""


class Action(Enum):
    """What to do."""

    GO_ON = "go on"
    RESTART = "restart"
    """Join the next round, because of another host."""
    RETRY = "retry"
    """Join the next round, because ranks of this host failed; it costs an attempt."""
    GIVE_UP = "give up"
    """Tell all hosts that the job has failed, and end."""
    END = "end"
    """Another host gave up, or says that the job is done."""
    DONE = "done"


@dataclass(frozen=True)
class Seen:
    """What one host knows at one moment."""

    own: MemberState
    peers: Sequence[MemberState] = ()
    """The other hosts of the round."""
    lost: int = 0
    """Hosts among them that are silent and had not finished."""
    waiting: int = 0
    """Hosts that wait for the next round."""
    has_ended: bool = False
    """Somebody has said that the job is over."""
    attempts_left: int = 0
    failed_seconds: float = 0.0
    """Since own ranks failed."""


def decide(seen: Seen) -> Action:
    """The next action.

    Where no attempt is left, ranks may have failed because another host is lost, which shows `LOST_SECONDS` later.
    """
    if seen.has_ended:
        return Action.END
    if seen.lost or MemberState.RESTARTING in seen.peers:
        return Action.RESTART
    if seen.own is MemberState.FAILED:
        if seen.attempts_left > 0:
            return Action.RETRY
        is_certain = not seen.peers or seen.failed_seconds > LOST_SECONDS
        return Action.GIVE_UP if is_certain else Action.GO_ON
    finished = [peer in (MemberState.FINISHED, MemberState.LEFT) for peer in seen.peers]
    if seen.own is MemberState.FINISHED:
        return Action.DONE if all(finished) else Action.GO_ON
    is_ending = any(finished)  # newcomers would make all of them begin again
    return Action.RESTART if seen.waiting and not is_ending else Action.GO_ON


@dataclass
class Attempts:
    """How often in a row the ranks of this host failed.

    A failure is taken back when the next round shows that a host was lost: ranks of the others fail with it.
    """

    limit: int
    used: int = 0

    @property
    def left(self) -> int:
        """Restarts that failures may still cause."""
        return self.limit - self.used

    def ran(self, seconds: float) -> None:
        """The ranks have run for so long."""
        if seconds >= CALM_SECONDS:
            self.used = 0

    def failed(self) -> None:
        """Ranks of this host failed."""
        self.used += 1

    def joined(self, before: frozenset[str], now: frozenset[str], *, by_failure: bool) -> None:
        """A round begins with the hosts `now`; the one `before` ended by a failure of ranks, or otherwise."""
        if by_failure and before - now:
            self.used -= 1
