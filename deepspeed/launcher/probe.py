"""What the front end must know of the host where the ranks meet: an address that others reach, and a free port.

One command on that host tells both (over ssh when it is another machine); its answer is read by pure functions.

```
   hostname -I; /proc/net/tcp, /proc/net/tcp6  --->  Probe(addresses, used ports)  --->  choose_address, choose_port
```

Does not live here: keeping a port on this machine (`ports`). `far_hosts` calls it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from deepspeed.common.addresses import found_addresses
from deepspeed.common.logging import get_logger
from deepspeed.errors import LaunchError
from deepspeed.launcher.ports import DEFAULT_PORT

__all__ = ["Probe", "addresses_of", "choose_address", "choose_port", "is_this_machine", "parse_probe", "probe"]

logger = get_logger("deepspeed.launcher.probe")

_TELL = "hostname -I; cat /proc/net/tcp /proc/net/tcp6 2> /dev/null; true"
_CONNECT_SECONDS = 10
_CANDIDATES = 200
_SOCKET = re.compile(r" *[0-9]+: [0-9A-F]+:(?P<port>[0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} (?P<state>[0-9A-F]{2}) ")
_TIME_WAIT = "06"  # such connections of an ended program do not hinder the next one (SO_REUSEADDR)


@dataclass(frozen=True)
class Probe:
    """What one host tells of itself."""

    addresses: tuple[str, ...]
    used_ports: frozenset[int]


def parse_probe(text: str) -> Probe:
    """Read the answer of the command: a line of addresses, then the kernel's tables of TCP sockets.

    A greeting that a shell's start-up file prints before them is no part of it, and a host may know no `hostname -I`.
    """
    lines = text.split("\n")
    addresses = next((words for line in lines if (words := line.split()) and all(map(_is_address, words))), [])
    rows = filter(None, map(_SOCKET.match, lines))
    return Probe(tuple(addresses), frozenset(int(row["port"], 16) for row in rows if row["state"] != _TIME_WAIT))


def _is_address(word: str) -> bool:
    try:
        ipaddress.ip_address(word)
    except ValueError:
        return False
    return True


def choose_address(told: Sequence[str], resolved: Collection[str], host: str) -> str:
    """The address of `host` for all ranks.

    Args:
        told: its own addresses, as `hostname -I` orders them.
        resolved: what its name means here; one of `told` among them is on a network that leads there.
        host: its name, which serves where no address is known.
    """
    return next((address for address in told if address in resolved), told[0] if told else host)


def choose_port(
    wanted: int | None, used: Collection[int], host: str, take: Callable[[int], bool] = lambda _port: True
) -> int:
    """The port where ranks meet.

    Args:
        wanted: what the user fixed; None means `DEFAULT_PORT` or, when that is in use, the next free one.
        used: ports in use on the host of rank 0.
        host: that host, for the error.
        take: called with a port that is free there; the next one is tried when it says False.

    Raises:
        LaunchError: the fixed port is in use or out of range, or so many are in use.
    """
    if wanted is not None:
        if not 0 < wanted < 2**16:
            raise LaunchError(f"--master_port {wanted} is no port: give 1 to 65535, or leave the option out.")
        if wanted in used:
            raise LaunchError(
                f"--master_port {wanted} is in use on {host}. Give another, or none: then a free one is chosen."
            )
        return wanted
    for port in range(DEFAULT_PORT, DEFAULT_PORT + _CANDIDATES):
        if port not in used and take(port):
            if port != DEFAULT_PORT:
                logger.info("port %d is in use on %s: this job meets at port %d", DEFAULT_PORT, host, port)
            return port
    raise LaunchError(
        f"the ports {DEFAULT_PORT} to {DEFAULT_PORT + _CANDIDATES - 1} are all in use on {host}: give a --master_port."
    )


def probe(host: str, hostfile: str, *, by_ssh: bool, ssh_port: int | None = None) -> Probe:
    """Ask `host`; blocks for one ssh, at most some seconds.

    Args:
        host: as the hostfile calls it.
        hostfile: its path, for the error.
        by_ssh: over ssh, as pdsh will reach it; else on this machine.
        ssh_port: port of its sshd, where it is not ssh's own choice.

    Raises:
        LaunchError: ssh does not get there.
    """
    if not by_ssh:
        return parse_probe(subprocess.run(["sh", "-c", _TELL], capture_output=True, text=True, check=False).stdout)
    options = ["-o", "PasswordAuthentication=no", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
    argv = ["ssh", *options, *([] if ssh_port is None else ["-p", str(ssh_port)]), host, _TELL]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise LaunchError(
            "there is no ssh on this machine: apt-get install openssh-client, or give --no_ssh_check and --master_addr."
        ) from None
    if done.returncode:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise LaunchError(
            f"Using hostfile at {hostfile} but host={host} was not reachable via ssh ({reason}). Make `ssh {host} true` "
            "work without a password; --no_ssh_check skips this test, and --no_ssh starts each host by hand."
        )
    return parse_probe(done.stdout)


def addresses_of(host: str) -> frozenset[str]:
    """What the name `host` means on this machine; empty when nothing (ssh may know it from its own configuration)."""
    try:
        return frozenset(found.address for found in found_addresses(host))
    except OSError:
        return frozenset()


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or address of this machine: one that a socket here can be bound to."""
    if host in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        found = found_addresses(host, 0)[0]
        with socket.socket(found.family, found.kind) as candidate:
            candidate.bind(found.place)
            return True
    return False
