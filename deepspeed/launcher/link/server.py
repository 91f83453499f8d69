"""The hub on its sockets. Its own launcher calls `serve`; see `hub` for what is decided and why."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterable

from deepspeed.common.addresses import listening_socket
from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError
from deepspeed.launcher.link.hub import CloseListener, HangUp, Hub, HubAction, Say, Tell
from deepspeed.launcher.link.job import LinkedJob
from deepspeed.launcher.link.messages import Message
from deepspeed.launcher.link.wire import Connection
from deepspeed.launcher.loop import Loop

__all__ = ["HubServer"]

logger = get_logger("deepspeed.launcher.launch")  # the name under which users know these messages


class HubServer:
    """Listens on the port where the ranks will meet, until all launchers are there, and serves them to the end.

    Raises:
        LaunchError: the port cannot be listened on.
    """

    def __init__(
        self,
        job: LinkedJob,
        versions: dict[str, str],
        limit_seconds: float,
        loop: Loop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._hub = Hub(job, versions, clock(), limit_seconds)
        self._connections: dict[int, Connection] = {}
        self._count = 0
        self._listener = _listener(job)
        self._is_listening = True
        loop.watch(self._listener, self._accept)

    @property
    def next_time(self) -> float:
        """When `tick` must be called again."""
        return self._hub.next_time

    def tick(self) -> None:
        """See `Hub.tick`; free of cost before `next_time`."""
        now = self._clock()
        if now >= self._hub.next_time:
            if self._is_listening:
                self._loop.watch(self._listener, self._accept)  # again, where it had to wait
            self._carry_out(self._hub.tick(now))

    def take(self, sock: socket.socket) -> None:
        """Serve whoever is at the other end of `sock`."""
        self._count += 1
        peer = self._count
        self._connections[peer] = Connection(
            sock, self._loop, lambda message: self._heard(peer, message), lambda why: self._lost(peer, why)
        )
        self._carry_out(self._hub.connected(peer, secrets.token_hex(16), self._clock()))

    def close(self) -> None:
        """End all connections."""
        self._close_listener()
        for connection in self._connections.values():
            connection.close()

    def _accept(self) -> None:
        while self._is_listening:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the caller is gone again, or we have no descriptor left until a stranger goes
                logger.warning("a launcher that called could not be answered: %s", error.strerror)
                self._loop.forget(self._listener)  # else it would be called, and warn, without a pause
                return
            self.take(sock)

    def _close_listener(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._loop.forget(self._listener)
            self._listener.close()

    def _heard(self, peer: int, message: Message) -> None:
        self._carry_out(self._hub.heard(peer, message, self._clock()))

    def _lost(self, peer: int, why: str) -> None:
        self._connections.pop(peer, None)
        self._carry_out(self._hub.lost(peer, why, self._clock()))

    def _carry_out(self, actions: Iterable[HubAction]) -> None:
        for action in actions:
            if isinstance(action, CloseListener):
                self._close_listener()
            elif isinstance(action, Tell):
                logger.warning("%s", action.text)
            elif isinstance(action, HangUp):
                connection = self._connections.pop(action.peer, None)
                if connection is not None:
                    connection.close()
            elif isinstance(action, Say) and action.peer in self._connections:
                self._connections[action.peer].send(action.message)


def _listener(job: LinkedJob) -> socket.socket:
    try:
        listener = listening_socket(job.address, job.port)
    except OSError as error:
        raise LaunchError(
            f"host {job.hosts[0]}: the launcher of rank 0 cannot listen on {job.address}:{job.port}, where the ranks "
            f"are to meet: {error.strerror}. Choose another port with --master_port, or end the program that uses it."
        ) from error
    listener.setblocking(False)
    return listener
