"""The port where the ranks of a job meet.

[Note: two jobs at once] Between choosing a port and rank 0 listening on it lie seconds, in which another job would choose
the same one. So the chooser holds a lock for the life of the job: a socket in the kernel's abstract name space, which has
no file, belongs to the same network name space as the port, and vanishes with its process however that ends. Other
programs are seen by trying to bind the port.

Does not live here: the address, and meeting there (`comm.world`). `runner` calls it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from types import TracebackType

from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError

__all__ = ["DEFAULT_PORT", "PortLease", "hold_port", "is_bindable", "lease_port"]

logger = get_logger("deepspeed.launcher.ports")

DEFAULT_PORT = 29500
_CANDIDATES = 200


class PortLease:
    """A port kept from other jobs of this machine until it is closed."""

    def __init__(self, port: int, lock: socket.socket | None) -> None:
        self.port = port
        self._lock = lock

    def __enter__(self) -> PortLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()


def lease_port(wanted: int | None) -> PortLease:
    """Take a port for a job of this machine.

    Args:
        wanted: the port the user fixed; None means `DEFAULT_PORT` or, when that is in use, the next free one.

    Raises:
        LaunchError: the fixed port is in use or out of range, or `_CANDIDATES` ports from the default on are in use.
    """
    if wanted is not None:
        if not 0 < wanted < 2**16:
            raise LaunchError(f"--master_port {wanted} is no port: give 1 to 65535, or leave the option out.")
        lease = _try(wanted)
        if lease is None:
            raise LaunchError(
                f"--master_port {wanted} is in use on this machine. Give another, or none: then a free one is chosen."
            )
        return lease
    for port in range(DEFAULT_PORT, DEFAULT_PORT + _CANDIDATES):
        lease = _try(port)
        if lease is not None:
            if port != DEFAULT_PORT:
                logger.info("port %d is in use: this job meets at port %d (--master_port chooses one)", DEFAULT_PORT, port)
            return lease
    raise LaunchError(
        f"the ports {DEFAULT_PORT} to {DEFAULT_PORT + _CANDIDATES - 1} are all in use on this machine: give a --master_port."
    )


def _try(port: int) -> PortLease | None:
    """The lease of `port`, or None when it is in use."""
    lease = hold_port(port)
    if lease is not None and not is_bindable(port):
        lease.__exit__(None, None, None)
        return None
    return lease


def hold_port(port: int) -> PortLease | None:
    """The lease of `port` against jobs that this machine starts, here or elsewhere; None when one of them has it.

    Whether the port is free is another question, for the machine where the ranks meet.
    """
    if sys.platform != "linux":  # no abstract names elsewhere: two starts within a second may collide there
        return PortLease(port, None)
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0deepspeed-master-port-{port}")
    except OSError:
        lock.close()
        return None
    return PortLease(port, lock)


def is_bindable(port: int) -> bool:
    """Whether a server of this machine could listen on `port` of every address, now.

    Connections of an ended server that linger do not count, as they do not hinder the next one (SO_REUSEADDR).

    Raises:
        LaunchError: the system forbids the port to this user.
    """
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        with contextlib.ExitStack() as closing:
            try:
                probe = closing.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                if error.errno in (errno.EACCES, errno.EPERM):
                    raise LaunchError(f"port {port} is not allowed to this user: give one above 1023.") from error
                if family == socket.AF_INET:
                    raise
                # a machine without IPv6: the IPv4 probe decides
    return True
