from __future__ import annotations

import errno
import socket

import pytest

from deepspeed.common import addresses
from deepspeed.common.addresses import connected_socket, found_addresses, listening_socket


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_job_of_one_machine_is_not_heard_elsewhere(host: str) -> None:
    with listening_socket(host, 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"
        socket.create_connection(server.getsockname()).close()


def test_a_name_that_means_the_loopback_only_here_is_listened_for_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_args, **_named: [entry])
    with listening_socket("worker-0", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_an_address_that_no_interface_has_is_listened_for_everywhere() -> None:
    with listening_socket("203.0.113.7", 0) as server:  # a documentation address
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_a_port_in_use_is_an_error() -> None:
    with listening_socket("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use") as caught:
        listening_socket("127.0.0.1", first.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE


def test_a_port_whose_connections_linger_can_be_taken_again() -> None:
    first = listening_socket("127.0.0.1", 0)
    port = first.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)), first.accept()[0]:
        first.close()
        listening_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["worker..cluster", "w" * 64, "\udc80"])
def test_what_can_be_no_name_is_an_error_of_the_resolver(host: str) -> None:
    for use in (found_addresses, lambda name: connected_socket(name, 1, 1.0), lambda name: listening_socket(name, 0)):
        with pytest.raises(socket.gaierror, match="it is no name of a host"):
            use(host)


def test_a_name_has_addresses_and_can_be_connected_to() -> None:
    assert "127.0.0.1" in {found.address for found in found_addresses("localhost")}
    with listening_socket("localhost", 0) as server, connected_socket("localhost", server.getsockname()[1], 1.0) as client:
        assert client.getpeername() == server.getsockname()
