"""A launcher's side of the link on its socket: calls the hub until it answers, and says what comes of it.

It serves launchers and, without ranks, the front end.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable

from deepspeed.common.logging import get_logger
from deepspeed.launcher.link.caller import Caller
from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.job import LinkedJob
from deepspeed.launcher.link.member import GREETING_SECONDS, Member, MemberPhase
from deepspeed.launcher.link.messages import Message
from deepspeed.launcher.link.server import HubServer
from deepspeed.launcher.link.wire import Connection
from deepspeed.launcher.loop import Loop

__all__ = ["MemberLink"]

logger = get_logger("deepspeed.launcher.launch")  # the name under which users know these messages

_SAY_SECONDS = 5.0
_SAY_AGAIN_SECONDS = 30.0


class MemberLink:
    """See `cause.Link`.

    Args:
        job: the job.
        member: our state; nothing has been said yet.
        loop: where sockets are watched.
        limit_seconds: how long the hub may be missing.
        server: the hub, when this launcher has it.
    """

    def __init__(
        self,
        job: LinkedJob,
        member: Member,
        loop: Loop,
        limit_seconds: float,
        server: HubServer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._member = member
        self._loop = loop
        self._clock = clock
        self._server = server
        self._connection: Connection | None = None
        self._caller = Caller(job.address, job.port, loop, self._connected, clock)
        self._give_up = clock() + limit_seconds
        self._say_next = clock() + _SAY_SECONDS
        self._greeting_until = float("inf")
        if server is not None:
            self._caller.stop()
            ours, theirs = socket.socketpair()
            self._connected(ours)
            server.take(theirs)

    @property
    def may_start(self) -> bool:
        """See `Link`."""
        return self._member.may_start

    @property
    def cause(self) -> Cause | None:
        """See `Link`."""
        return self._member.cause

    @property
    def is_hurried(self) -> bool:
        """See `Link`."""
        return self._member.is_hurried

    @property
    def is_over(self) -> bool:
        """See `Link`."""
        return self._member.is_over

    @property
    def is_settled(self) -> bool:
        """See `Link`."""
        return self._member.is_settled

    @property
    def is_heard(self) -> bool:
        """Whether the hub has taken us in, and so hears what we say."""
        return self._member.was_let_in and not self._member.is_over

    @property
    def next_time(self) -> float:
        """See `Link`."""
        times = [self._member.next_time]
        if self._is_calling:
            times += [self._caller.next_time, self._greeting_until, self._say_next, self._give_up]
        if self._server is not None:
            times.append(self._server.next_time)
        return min(times)

    def tick(self) -> None:
        """See `Link`."""
        if self._server is not None:
            self._server.tick()
        if self._is_calling:
            self._call()
        self._say(self._member.tick(self._clock()))
        if self._member.is_over:
            self._caller.stop()

    def failed(self, cause: Cause) -> None:
        """See `Link`."""
        self._say(self._member.failed(cause))

    def asked(self, cause: Cause) -> None:
        """The front end was asked to end the job, perhaps again."""
        self._say(self._member.asked(cause))

    def done(self) -> None:
        """See `Link`."""
        self._say(self._member.done())

    def close(self) -> None:
        """See `Link`."""
        self._caller.stop()
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            self._server.close()

    @property
    def _is_calling(self) -> bool:
        return self._member.phase is MemberPhase.CALLING

    def _say(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if self._connection is not None:
                self._connection.send(message)

    def _call(self) -> None:
        now = self._clock()
        if now >= self._greeting_until and self._connection is not None:
            self._connection.close()
            self._met_no_hub()
        self._caller.tick()
        where = f"the launcher of rank 0 at {self._job.address}:{self._job.port} (host {self._job.hosts[0]})"
        if now >= self._give_up:
            self._member.gave_up(Cause(255, f"host {self._member.host} could not reach {where}: {self._caller.outcome}"))
        elif now >= self._say_next:
            self._say_next = now + _SAY_AGAIN_SECONDS
            level = logging.DEBUG if self._member.number is None else logging.WARNING  # a front end can do without
            logger.log(level, "host %s waits for %s: %s", self._member.host, where, self._caller.outcome)

    def _met_no_hub(self) -> None:
        self._connection, self._greeting_until = None, float("inf")
        self._caller.again("what answers there is no launcher of this job; give the job another --master_port")
        if self._member.number is None:  # it is the store of rank 0: we have come too late
            self._caller.stop()

    def _connected(self, sock: socket.socket) -> None:
        self._greeting_until = self._clock() + GREETING_SECONDS
        self._connection = Connection(sock, self._loop, self._heard, self._lost)

    def _heard(self, message: Message) -> None:
        self._say(self._member.heard(message, self._clock()))

    def _lost(self, why: str) -> None:
        if self._is_calling:
            self._met_no_hub()
        self._member.lost(why)
