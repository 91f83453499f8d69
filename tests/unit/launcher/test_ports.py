from __future__ import annotations

import logging
import socket
import subprocess
import sys

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher import ports
from deepspeed.launcher.ports import is_bindable, lease_port


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listener(port: int, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1" if family == socket.AF_INET else "::1", port))
    server.listen()
    return server


def test_the_default_port_is_taken_when_it_is_free(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(ports, "DEFAULT_PORT", free_port)
    with lease_port(None) as lease:
        assert lease.port == free_port


def test_a_listener_on_the_default_port_moves_the_job_on_and_is_settled(
    monkeypatch: pytest.MonkeyPatch, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ports, "DEFAULT_PORT", free_port)
    with _listener(free_port), caplog.at_level(logging.INFO, "DeepSpeed"), lease_port(None) as lease:
        assert lease.port > free_port
    assert f"port {free_port} is in use: this job meets at port {lease.port}" in caplog.text


def test_two_jobs_started_at_once_get_different_ports(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setattr(ports, "DEFAULT_PORT", free_port)
    with lease_port(None) as first, lease_port(None) as second:  # nobody listens yet on either
        assert first.port == free_port != second.port
    with lease_port(None) as third:
        assert third.port == free_port


def test_a_lease_ends_with_its_process(free_port: int) -> None:
    code = (
        "import time; from deepspeed.launcher.ports import lease_port;"
        f"lease = lease_port({free_port}); print(1, flush=True); time.sleep(30)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other:
        other.stdout.readline()
        with pytest.raises(LaunchError, match="in use"):
            lease_port(free_port)
        other.kill()
        other.wait()
        with lease_port(free_port) as lease:
            assert lease.port == free_port


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_that_the_user_fixed_and_somebody_uses_is_refused(free_port: int, family: socket.AddressFamily) -> None:
    try:
        server = _listener(free_port, family)
    except OSError as error:
        pytest.skip(f"no loopback address of {family.name} on this machine: {error}")
    with server, pytest.raises(LaunchError, match=f"--master_port {free_port} is in use on this machine"):
        lease_port(free_port)


def test_connections_that_linger_after_a_server_do_not_make_a_port_unusable(free_port: int) -> None:
    with _listener(free_port) as server:
        client = socket.create_connection(("127.0.0.1", free_port))
        accepted, _ = server.accept()
        accepted.close()  # the server's side closes first, so the lingering end holds its port
        client.close()
    assert is_bindable(free_port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(LaunchError, match="give 1 to 65535"):
        lease_port(port)


def test_a_leased_port_can_be_listened_on_by_rank_0(free_port: int) -> None:
    with lease_port(free_port), _listener(free_port):
        pass
