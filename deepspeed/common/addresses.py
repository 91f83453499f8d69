"""What names of hosts mean, and where a server of a job listens: on the address under which the job's hosts know it, and
nowhere else if that can be.

Lives here: names, one listening socket, one connected socket. Does not live here: which port (`launcher.ports`), what is
said over it (`launcher.link`, `comm.rendezvous`, which call this).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any, NamedTuple

__all__ = ["Found", "connected_socket", "found_addresses", "listening_socket"]

_BACKLOG = 4096  # every rank of a large job may call in one moment; the kernel caps it


class Found(NamedTuple):
    """One meaning of a name, as `socket.getaddrinfo` tells it."""

    family: socket.AddressFamily
    kind: socket.SocketKind
    place: tuple[Any, ...]
    """What `connect` and `bind` take."""

    @property
    def address(self) -> str:
        """The address alone."""
        return str(self.place[0])


def found_addresses(host: str, port: int | None = None, kind: socket.SocketKind = socket.SOCK_STREAM) -> list[Found]:
    """What the name or address `host` means on this machine, in the resolver's order; at least one.

    Raises:
        socket.gaierror: nothing; also for a text that cannot be a name (`a..b`, or a label of more than 63 characters), for
            which `socket` itself has a UnicodeError.
    """
    try:
        found = socket.getaddrinfo(host, port, type=kind)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"it is no name of a host: {error}") from error
    return [Found(family, each_kind, place) for family, each_kind, _, _, place in found]


def connected_socket(host: str, port: int, seconds: float) -> socket.socket:
    """A TCP socket that is connected to `port` of `host`; every address of the name is tried, each for so many seconds.

    Raises:
        socket.gaierror: see `found_addresses`.
        OSError: nobody answered there.
    """
    try:
        return socket.create_connection((host, port), seconds)
    except UnicodeError:
        found_addresses(host)  # the same text for every use of a name
        raise


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on `port` of the address `host` of this machine.

    Every address of the machine is listened on only where `host` does not say which one: a name that means the loopback
    here may mean another address elsewhere (Debian's own entry for a host's name), and an address that no interface has
    may be translated on the way (Kubernetes, clouds).

    Args:
        host: name or address, as the other hosts of the job know it.
        port: 0 means any free one.

    Raises:
        OSError: the port is in use or not allowed, or `host` cannot be resolved.
    """
    family, address = _resolved(host)
    if host in ("localhost", address) or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        try:
            return _listening(family, address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    try:
        return _listening(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
            raise
        return _listening(socket.AF_INET, "0.0.0.0", port)  # a machine without IPv6


def _resolved(host: str) -> tuple[socket.AddressFamily, str]:
    """IPv4 first: an IPv6 address that a name also has is often only on one side of a job."""
    found = min(found_addresses(host), key=lambda each: each.family != socket.AF_INET)
    return found.family, found.address


def _listening(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((address, port))
        server.listen(_BACKLOG)
    except OSError:
        server.close()
        raise
    return server
