"""Messages over sockets: one connection, without blocking.

[Note: what the kernel notices] Silence is judged by `hub` and `member`. The kernel adds what they do not see: keep-alive
probes and a limit on unacknowledged data end the connection to a host that is gone or cut off within `_GONE_SECONDS`, but
not to one whose process is merely stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable

from deepspeed.launcher.link.messages import Beat, LinkError, Message, decode, encode, split_lines
from deepspeed.launcher.loop import Loop

__all__ = ["Connection"]

_GONE_SECONDS = 5
_CHUNK_NBYTES = 65536


class Connection:
    """One end of a link, on `loop` until it is closed.

    Args:
        sock: connected.
        loop: where it is watched.
        on_message: called with each message.
        on_end: called once, with the reason, when the other side has ended or says what is no message; not after `close`.
    """

    def __init__(
        self, sock: socket.socket, loop: Loop, on_message: Callable[[Message], None], on_end: Callable[[str], None]
    ) -> None:
        self._socket = sock
        self._loop = loop
        self._on_message = on_message
        self._on_end = on_end
        self._received = b""
        self._unsent = b""
        self._is_open = True
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            _notice_a_lost_host(sock)
        loop.watch(sock, self._ready)

    def send(self, message: Message) -> None:
        """Send `message` as soon as the other side takes it. A beat is left out when others wait already."""
        if self._is_open and not (self._unsent and isinstance(message, Beat)):
            self._unsent += encode(message)
            self._flush()

    def close(self) -> None:
        """End the connection, after what can be sent at once."""
        if self._is_open:
            self._is_open = False
            self._loop.forget(self._socket)
            self._socket.close()

    def _flush(self) -> None:
        was_waiting = len(self._unsent)
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(_in_words(error))
            return
        if bool(self._unsent) or was_waiting:
            self._loop.watch(self._socket, self._ready, writes=bool(self._unsent))

    def _ready(self) -> None:
        if self._unsent:
            self._flush()
        while self._is_open:
            try:
                chunk = self._socket.recv(_CHUNK_NBYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(_in_words(error))
                return
            if not chunk:
                self._end("its launcher ended without a word (killed?)")
                return
            self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        try:
            lines, self._received = split_lines(self._received + chunk)
            for line in lines:
                message = decode(line)
                if self._is_open:  # the message before may have led to its end
                    self._on_message(message)
        except LinkError as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(why)


def _in_words(error: OSError) -> str:
    return f"the connection to it broke ({os.strerror(error.errno or 0)})"


def _notice_a_lost_host(sock: socket.socket) -> None:
    """See [Note: what the kernel notices]."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a kernel without these notices later, by silence
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _GONE_SECONDS - 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_SECONDS * 1000)
