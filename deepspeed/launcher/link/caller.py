"""Calling somebody who may not be there yet, without blocking, until he answers."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable

from deepspeed.common.addresses import found_addresses
from deepspeed.launcher.loop import Loop

__all__ = ["Caller"]

_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_CALL_SECONDS = 5.0  # for a call that nobody refuses: the host is off, or a firewall swallows it


class Caller:
    """Connects to `port` of `address`, again and again, on `loop`.

    Args:
        address: name or address.
        port: the port.
        loop: where the socket is watched meanwhile.
        on_answer: called with the connected socket, which is then no business of ours until `again`.

    Attributes:
        outcome: of the last call, in words.
    """

    def __init__(
        self,
        address: str,
        port: int,
        loop: Loop,
        on_answer: Callable[[socket.socket], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcome = "no answer yet"
        self._place = (address, port)
        self._loop = loop
        self._on_answer = on_answer
        self._clock = clock
        self._socket: socket.socket | None = None
        self._pause = _PAUSE_SECONDS
        self._next = clock()

    @property
    def next_time(self) -> float:
        """When `tick` must be called again."""
        return self._next

    def tick(self) -> None:
        """Call, or give a call up, when it is time."""
        now = self._clock()
        if now < self._next:
            return
        if self._socket is not None:
            self.again("nobody answers")
        else:
            self._call(now)

    def again(self, outcome: str) -> None:
        """Call again after a pause, as the last call led to `outcome`."""
        self.stop()
        self.outcome = outcome
        self._next = self._clock() + self._pause
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """Call no more."""
        self._next = float("inf")
        if self._socket is not None:
            self._loop.forget(self._socket)
            self._socket.close()
            self._socket = None

    def _call(self, now: float) -> None:
        try:
            found = min(found_addresses(*self._place), key=lambda each: each.family != socket.AF_INET)  # as the hub listens
            self._socket = socket.socket(found.family, found.kind)
        except OSError as error:
            self.again(f"{self._place[0]}: {error.strerror}")
            return
        self._next = now + _CALL_SECONDS
        self._socket.setblocking(False)
        number = self._socket.connect_ex(found.place)
        if number == errno.EINPROGRESS:
            self._loop.watch(self._socket, self._answered, writes=True)
        else:
            self._ended(number)

    def _answered(self) -> None:
        assert self._socket is not None  # it is watched only while it is there
        self._loop.forget(self._socket)
        self._ended(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _ended(self, number: int) -> None:
        assert self._socket is not None  # see the callers
        if number:
            self.again(os.strerror(number))
        elif _is_own_echo(self._socket):
            self.again("nobody listens there")
        else:
            sock, self._socket, self._next = self._socket, None, float("inf")
            self._on_answer(sock)


def _is_own_echo(sock: socket.socket) -> bool:
    """Whether the kernel gave us the very port that we call, or the other side has hung up already."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:
        return True
