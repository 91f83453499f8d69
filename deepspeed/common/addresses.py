"""Where a server of a job listens: on the address under which the job's hosts know it, and nowhere else if that can be.

Lives here: one listening socket. Does not live here: which port (`launcher.ports`), what is said over it (`launcher.link`,
`comm.rendezvous`, which call this).
"""

from __future__ import annotations

import errno
import ipaddress
import socket

__all__ = ["listening_socket"]

_BACKLOG = 4096  # every rank of a large job may call in one moment; the kernel caps it


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
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, str(address[0])


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
