"""A launcher's side of the link, and the front end's, which is a member without ranks.

```
   CALLING --> WAITING --> RUNNING --> STOPPING --> OVER
      |           |           |            ^
      |           |           '-- Stop, or something failed here, or the hub is lost
      |           '-- Refused, or as above --> OVER, or STOPPING
      '-- nobody greets: call again
```

Pure: events with the time at which they were seen go in, messages to the hub come out. `cause` says why the job ends as soon
as it does: first what failed here, then what the hub says; `may_start`, `is_over` and `is_hurried` say what may be done.

Does not live here: sockets and clocks (`wire`), the other side (`hub`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.hub import BEAT_SECONDS, SILENT_SECONDS
from deepspeed.launcher.link.messages import (
    PROTOCOL,
    Beat,
    Done,
    Failed,
    Go,
    Greeting,
    Hello,
    Message,
    Refused,
    Stop,
    proof_of,
)

__all__ = ["GREETING_SECONDS", "Member", "MemberPhase"]

GREETING_SECONDS = 3.0
"""Who answers a call and says nothing for so long is no hub."""


class MemberPhase(Enum):
    """See the picture at the top of the file."""

    CALLING = "calling"
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass
class Member:
    """The state of one side. Each method that returns messages returns what to send to the hub, in order."""

    number: int | None
    """None: the front end."""

    hub_name: str
    """Of the hub's host, for messages."""

    host: str
    pid: int
    job: str
    versions: dict[str, str]
    token: str
    phase: MemberPhase = MemberPhase.CALLING
    cause: Cause | None = None
    is_hurried: bool = False
    """Whether ranks are to be ended without the time to end by themselves."""

    was_let_in: bool = False
    """Whether the hub has said more than a greeting."""

    is_settled: bool = False
    """Whether all members are done and the front end knows why."""

    _heard: float = float("inf")
    _next_beat: float = float("inf")

    @property
    def may_start(self) -> bool:
        """Whether all members are there."""
        return self.phase is MemberPhase.RUNNING

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.phase is MemberPhase.OVER

    @property
    def next_time(self) -> float:
        """When `tick` must be called again."""
        return min(self._next_beat, self._heard + SILENT_SECONDS)

    def heard(self, message: Message, now: float) -> list[Message]:
        """The hub said `message`."""
        if self.phase is MemberPhase.CALLING:
            return self._greeted(message, now)
        self._heard = now
        self.was_let_in = self.was_let_in or not isinstance(message, Refused)
        if isinstance(message, Refused):
            self._end(
                Cause(1, f"host {self.host} was refused by the launcher of rank 0 on {self.hub_name}: {message.reason}")
            )
        elif isinstance(message, Go) and self.phase is MemberPhase.WAITING:
            self.phase = MemberPhase.RUNNING
        elif isinstance(message, Stop):
            self.cause = message.cause
            self.is_hurried = self.is_hurried or message.is_now
            self.phase = MemberPhase.STOPPING if not self.is_over else self.phase
        elif isinstance(message, Done):
            self.is_settled = message.is_settled
            self._end(self.cause)
        return []

    def lost(self, why: str) -> None:
        """The connection has ended. Before the greeting this changes nothing: the caller calls again."""
        if self.phase in (MemberPhase.CALLING, MemberPhase.OVER):
            return
        self._end(self.cause or Cause(255, f"host {self.hub_name}, where the launcher of rank 0 runs, was lost: {why}"))

    def gave_up(self, cause: Cause) -> None:
        """The hub could not be reached."""
        self._end(self.cause or cause)

    def tick(self, now: float) -> list[Message]:
        """Time has come to `now`; call it at `next_time` at the latest, after all that was received has been told."""
        if self.phase in (MemberPhase.CALLING, MemberPhase.OVER):
            return []
        if now - self._heard >= SILENT_SECONDS:
            self.lost(f"not heard from for {now - self._heard:.0f} s (it is frozen, or the network between us is down)")
            return []
        if now < self._next_beat:
            return []
        self._next_beat = now + BEAT_SECONDS
        return [Beat()]

    def failed(self, cause: Cause) -> list[Message]:
        """Something ended here, and the job with it."""
        return self._leave(cause, Failed(cause))

    def asked(self, cause: Cause) -> list[Message]:
        """The front end was asked to end the job, perhaps again."""
        if self.cause is not None:
            return self._said(Stop(cause, is_now=True))
        return self._leave(cause, Stop(cause))

    def done(self) -> list[Message]:
        """Nothing of the job is left here."""
        if self.phase is MemberPhase.CALLING:  # nobody knows of us
            self._end(self.cause)
            return []
        return self._said(Done())

    def _greeted(self, message: Message, now: float) -> list[Message]:
        if not isinstance(message, Greeting):
            return []
        self._heard = self._next_beat = now
        self.phase = MemberPhase.WAITING
        proof = proof_of(self.token, message.nonce)
        hello = Hello(PROTOCOL, self.number, self.host, self.pid, self.job, self.versions, proof)
        return [hello]

    def _leave(self, cause: Cause, message: Message) -> list[Message]:
        if self.cause is not None:
            return []
        self.cause = cause
        if self.phase in (MemberPhase.WAITING, MemberPhase.RUNNING):
            self.phase = MemberPhase.STOPPING
        return self._said(message)

    def _said(self, message: Message) -> list[Message]:
        return [] if self.phase in (MemberPhase.CALLING, MemberPhase.OVER) else [message]

    def _end(self, cause: Cause | None) -> None:
        self.cause = cause
        self.phase = MemberPhase.OVER
        self._heard = self._next_beat = float("inf")
