"""The hub: the launcher of rank 0 knows all others, and is where a job's one cause of its end is decided.

```
             all are there                    the first failure          all have ended or are lost
   GATHERING --------------> RUNNING -----------------------> STOPPING ---------------------------> OVER
       |                        |  '--> SETTLING ---------------^                                    ^
       |                        |       (an exit status: wait     '                                  |
       |                        |       a moment for its cause)                                      |
       |                        '---- all are done --------------------------------------------------'
       '---- a host is missing for too long, has other versions, or the front end goes --> STOPPING
```

Pure: events with the time at which they were seen go in, actions come out. The hub's own member is one of the peers.

[Note: who is lost] A member that is silent for `SILENT_SECONDS` is lost: its host is frozen or cut off, and all others would
wait for it for ever. A silent front end is not lost, as Ctrl-Z does that; the kernel tells when its host is gone (`wire`).

[Note: echoes] A rank that ends takes its peers along: they meet an error and end with an exit status, sometimes sooner than
the news of the first arrives. So an exit status waits `SETTLE_SECONDS` for a signal or a lost host, which are no echoes.

Does not live here: sockets and clocks (`wire`), the other side (`member`).
"""

from __future__ import annotations

import hmac
import signal
from dataclasses import dataclass, field
from enum import Enum

from deepspeed.common.wording import some
from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.job import LinkedJob
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

__all__ = ["BEAT_SECONDS", "SILENT_SECONDS", "CloseListener", "HangUp", "Hub", "HubAction", "HubPhase", "Say", "Tell"]

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.0
SETTLE_SECONDS = 0.2
MISSING_SECONDS = 5.0
"""After which it is said who is missing, and again every `_MISSING_AGAIN_SECONDS`."""

_MISSING_AGAIN_SECONDS = 30.0
_SHOWN = 8
_FRONT_END_SECONDS = 1.0
_STRANGER_SECONDS = 5.0
_END_SECONDS = 12.0  # more than a member needs that asks (3 s), ends (1) and clears up (2.5) and passes its output on (3)


class HubPhase(Enum):
    """See the picture at the top of the file."""

    GATHERING = "gathering"
    RUNNING = "running"
    SETTLING = "settling"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True)
class Say:
    """Send `message` to `peer`."""

    peer: int
    message: Message


@dataclass(frozen=True)
class HangUp:
    """Close the connection to `peer`, after what was said."""

    peer: int


@dataclass(frozen=True)
class CloseListener:
    """Let go of the port, which rank 0 takes."""


@dataclass(frozen=True)
class Tell:
    """Tell the user."""

    text: str


HubAction = Say | HangUp | CloseListener | Tell


@dataclass
class _Peer:
    nonce: str
    heard: float
    member: int | None = None
    has_joined: bool = False


@dataclass
class Hub:
    """The state of the hub. Each method returns what is to be done, in order."""

    job: LinkedJob
    versions: dict[str, str]
    began: float
    limit_seconds: float
    """How long members may be missing at the start."""

    phase: HubPhase = HubPhase.GATHERING
    cause: Cause | None = None
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _seats: dict[int, int] = field(default_factory=dict)  # the peer that has joined as each member
    _front_end: int | None = None
    _awaited: set[int] = field(default_factory=set)  # members that have joined and are neither done nor lost
    _has_lost: bool = False  # a member that was not done
    _said_missing: float = 0.0
    _deadline: float = float("inf")  # of the phase
    _next_beat: float = 0.0

    def connected(self, peer: int, nonce: str, now: float) -> list[HubAction]:
        """Somebody called, whom the caller of this names `peer` from now on."""
        self._peers[peer] = _Peer(nonce, now)
        return [Say(peer, Greeting(PROTOCOL, nonce))]

    def heard(self, peer: int, message: Message, now: float) -> list[HubAction]:
        """`peer` said `message`."""
        who = self._peers.get(peer)
        if who is None:
            return []
        who.heard = now
        if not who.has_joined:
            return self._welcome(peer, who, message, now)
        if isinstance(message, Failed) and who.member is not None:
            return self._failed(message.cause, now)
        if isinstance(message, Stop) and who.member is None:
            return self._asked(message, now)
        if isinstance(message, Done) and who.member is not None:
            self._awaited.discard(who.member)
            return self._leave_if_all_are_done(now)
        return []

    def lost(self, peer: int, why: str, now: float) -> list[HubAction]:
        """The connection to `peer` has ended."""
        who = self._peers.pop(peer, None)
        if who is None or not who.has_joined or self.phase is HubPhase.OVER:
            return []
        if who.member is None:
            self._front_end = None
            text = "the deepspeed command that started the job is gone"
            return self._stop(Cause(128 + signal.SIGTERM, text), now)
        del self._seats[who.member]
        is_awaited = who.member in self._awaited
        self._awaited.discard(who.member)
        if self.phase is HubPhase.GATHERING and not self.job.has_front_end:
            self._deadline = float("inf")
            return []  # it may be started again
        if not is_awaited:
            return self._leave_if_all_are_done(now)
        self._has_lost = True
        cause = Cause(255, f"{self.job.name_of(who.member)} was lost: {why}")
        return [*self._failed(cause, now), *self._leave_if_all_are_done(now)]

    def tick(self, now: float) -> list[HubAction]:
        """Time has come to `now`; call it at `next_time` at the latest, after all that was received has been told."""
        actions: list[HubAction] = []
        for peer, who in list(self._peers.items()):
            if not who.has_joined and now - who.heard >= _STRANGER_SECONDS:
                actions += self._refuse(peer, "said nothing")
            elif who.member is not None and now - who.heard >= SILENT_SECONDS:
                actions += [HangUp(peer), *self.lost(peer, _silence(now - who.heard), now)]
        if self.phase is HubPhase.GATHERING:
            actions += self._gather(now)
        elif self.phase is HubPhase.SETTLING and now >= self._deadline:
            assert self.cause is not None  # what settles is a cause
            actions += self._stop(self.cause, now)
        elif self.phase is HubPhase.STOPPING and now >= self._deadline:
            actions += self._over()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            actions += self._beats(now)
        return actions

    @property
    def next_time(self) -> float:
        """When `tick` must be called again."""
        return min(self._next_beat, self._deadline)

    def _beats(self, now: float) -> list[HubAction]:
        """A beat for everybody who hears: those for a front end that is stopped would pile up, and end its connection."""
        is_stopped = self._front_end is not None and now - self._peers[self._front_end].heard >= SILENT_SECONDS
        peers = (peer for peer in self._listeners() if not (is_stopped and peer == self._front_end))
        return [Say(peer, Beat()) for peer in peers]

    def _say_to_all(self, message: Message) -> list[HubAction]:
        return [Say(peer, message) for peer in self._listeners()]

    def _listeners(self) -> list[int]:
        """All peers that have joined."""
        return [*self._seats.values(), *([] if self._front_end is None else [self._front_end])]

    def _welcome(self, peer: int, who: _Peer, message: Message, now: float) -> list[HubAction]:
        """Take a caller in, or refuse it. A member that cannot take part ends the job, as it would never start."""
        if not isinstance(message, Hello):
            return self._refuse(peer, "is no launcher of this version")
        reason = self._why_a_stranger(message, who.nonce)
        if reason:
            return self._refuse(peer, reason)
        fault = self._why_unfit(message)
        if fault:
            return [*self._refuse(peer, fault), *self._stop(Cause(1, f"host {message.host}: {fault}"), now)]
        who.has_joined, who.member = True, message.member
        if message.member is None:
            self._front_end = peer
        else:
            self._seats[message.member] = peer
            self._awaited.add(message.member)
        if self.phase is HubPhase.STOPPING:
            assert self.cause is not None  # what stops is a cause
            return [Say(peer, Stop(self.cause))]
        return self._gather(now) if self.phase is HubPhase.GATHERING else []

    def _why_a_stranger(self, hello: Hello, nonce: str) -> str:
        if not hmac.compare_digest(hello.proof.encode(), proof_of(self.job.token, nonce).encode()):
            return (
                "it belongs to another job (another DS_JOB_TOKEN), which meets at the same port. "
                "Give one of the two jobs another --master_port."
            )
        if hello.member is None:
            return ""
        if not 0 <= hello.member < len(self.job.hosts):
            return (
                f"there is no member {hello.member} in a job of {len(self.job.hosts)}: give each host its own --node_rank."
            )
        if hello.member in self._seats:
            return (
                f"{self.job.name_of(hello.member)} (number {hello.member}) is here already: another launcher runs with the "
                "same number. Give each host its own --node_rank, or end the other launcher."
            )
        return ""

    def _why_unfit(self, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return (
                f"it speaks version {hello.protocol}, the launcher of rank 0 {PROTOCOL}: install the same deepspeed on both."
            )
        if hello.job != self.job.description:
            return (
                f"its command names the hosts and slots {hello.job}, the one on the host of rank 0 {self.job.description}: "
                "use the same hostfile and flags on all hosts."
            )
        differing = [
            f"{name} {hello.versions.get(name)} (rank 0's host has {version})"
            for name, version in self.versions.items()
            if hello.versions.get(name) != version
        ]
        if hello.member is None or not differing:
            return ""
        return f"it has {', '.join(differing)}: install the same version on all hosts."

    def _refuse(self, peer: int, reason: str) -> list[HubAction]:
        del self._peers[peer]
        return [
            Say(peer, Refused(reason)),
            HangUp(peer),
            Tell(f"refused a caller at the port where the ranks meet: {reason}"),
        ]

    def _gather(self, now: float) -> list[HubAction]:
        if len(self._seats) == len(self.job.hosts):
            if self._deadline == float("inf"):
                self._deadline = now + _FRONT_END_SECONDS
            if self.job.has_front_end and self._front_end is None and now < self._deadline:
                return []
            self.phase, self._deadline = HubPhase.RUNNING, float("inf")
            return [CloseListener(), *self._say_to_all(Go())]
        waited = now - self.began
        if waited >= self.limit_seconds:
            text = f"{self._missing()} did not start within {waited:.0f} s: see above what ssh or the scheduler said"
            return self._stop(Cause(255, text), now)
        since, pause = self.began, MISSING_SECONDS
        if self._said_missing:
            since, pause = self._said_missing, _MISSING_AGAIN_SECONDS
        if now - since < pause:
            return []
        self._said_missing = now
        there = f"{len(self._seats)} of {len(self.job.hosts)} launchers are here after {waited:.0f} s"
        return [Tell(f"{there}; waiting for {self._missing()}")]

    def _missing(self) -> str:
        missing = (member for member in range(len(self.job.hosts)) if member not in self._seats)
        return some([self.job.name_of(member) for member in missing], _SHOWN)

    def _failed(self, cause: Cause, now: float) -> list[HubAction]:
        if self.phase is HubPhase.SETTLING and not cause.may_be_echo:
            return self._stop(cause, now)
        if self.phase not in (HubPhase.RUNNING, HubPhase.GATHERING):
            return []
        if not cause.may_be_echo or self.phase is HubPhase.GATHERING:
            return self._stop(cause, now)
        self.phase, self.cause, self._deadline = HubPhase.SETTLING, cause, now + SETTLE_SECONDS
        return []

    def _asked(self, message: Stop, now: float) -> list[HubAction]:
        if self.phase is HubPhase.STOPPING and self.cause is not None:  # asked again: no more patience
            return self._say_to_all(Stop(self.cause, is_now=True))
        return self._stop(message.cause, now)

    def _stop(self, cause: Cause, now: float) -> list[HubAction]:
        if self.phase in (HubPhase.STOPPING, HubPhase.OVER):
            return []
        self.phase, self.cause, self._deadline = HubPhase.STOPPING, cause, now + _END_SECONDS
        return [*self._say_to_all(Stop(cause)), *self._leave_if_all_are_done(now)]

    def _leave_if_all_are_done(self, now: float) -> list[HubAction]:
        if self._awaited or self.phase is HubPhase.GATHERING:
            return []
        if self.phase is HubPhase.SETTLING:  # nobody is left whose news could come
            assert self.cause is not None  # what settles is a cause
            return self._stop(self.cause, now)
        return self._over() if self.phase is not HubPhase.OVER else []

    def _over(self) -> list[HubAction]:
        self.phase, self._deadline = HubPhase.OVER, float("inf")
        is_settled = self._front_end is not None and not self._awaited and not self._has_lost
        return self._say_to_all(Done(is_settled))


def _silence(seconds: float) -> str:
    return f"not heard from for {seconds:.0f} s (its host is frozen, or the network to it is down)"
