"""Why a job ends, and what a launcher does with the others of its job; the link of a job of one launcher, which has none.

Does not live here: the link of several (`client`).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Alone", "Cause", "Link"]


@dataclass(frozen=True)
class Cause:
    """Why a job ends before its time: one per job."""

    status: int
    """What every launcher, and the command, exits with."""

    text: str
    """One sentence for the user, with the host's name."""

    member: int | None = None
    """The member that tells the user itself, because it has the last lines of the rank."""

    signum: int = signal.SIGTERM
    """What ranks are asked to end with."""

    may_be_echo: bool = False
    """Whether another's end may have led to it: an exit status may, a signal or a silent host hardly."""


class Link(Protocol):
    """What a launcher does with the others of its job."""

    @property
    def may_start(self) -> bool:
        """Whether all are there."""

    @property
    def cause(self) -> Cause | None:
        """Why the job ends; None while it goes on."""

    @property
    def is_hurried(self) -> bool:
        """Whether ranks are to be ended at once."""

    @property
    def is_over(self) -> bool:
        """Whether all others are done, or cannot be waited for."""

    @property
    def is_settled(self) -> bool:
        """Whether all others are done and the command that started the job knows why."""

    @property
    def next_time(self) -> float:
        """When `tick` must be called again."""

    def tick(self) -> None:
        """Call it after each wait of the loop."""

    def failed(self, cause: Cause) -> None:
        """Say that something ended here; the first word counts."""

    def done(self) -> None:
        """Say that nothing of the job is left here."""

    def close(self) -> None:
        """End the link."""


class Alone:
    """See `Link`: nobody is asked, and nobody waited for."""

    may_start = True
    is_hurried = False
    is_settled = False
    next_time = float("inf")

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.is_over = False

    def tick(self) -> None:
        """See `Link`."""

    def failed(self, cause: Cause) -> None:
        """See `Link`."""
        self.cause = self.cause or cause

    def done(self) -> None:
        """See `Link`."""
        self.is_over = True

    def close(self) -> None:
        """See `Link`."""
