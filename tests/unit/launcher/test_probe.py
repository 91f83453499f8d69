"""`launcher.probe`: what a host tells is read rightly, and address and port are chosen well."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import LaunchError
from deepspeed.launcher import probe as probing
from deepspeed.launcher.probe import Probe, addresses_of, choose_address, choose_port, is_this_machine, parse_probe, probe

# One listener on port 29500 (733C) of every address, a connection on 29501 (733D), a lingering one on 29502; IPv6: 29503.
TOLD = """\
10.77.0.11 172.17.0.1 fd00::1
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 17 1 0000000000000000 100 0 0 10 0
   1: 0B004D0A:733D 0C004D0A:0016 01 00000000:00000000 00:00000000 00000000     0        0 18 1 0000000000000000 20 4
   2: 0B004D0A:733E 0C004D0A:0016 06 00000000:00000000 03:00001770 00000000     0        0 0 3 0000000000000000
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt
   0: 00000000000000000000000000000000:733F 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 0 0 0 19 1
"""


def test_addresses_and_ports_in_use_are_read_from_the_answer() -> None:
    assert parse_probe(TOLD) == Probe(("10.77.0.11", "172.17.0.1", "fd00::1"), frozenset({29500, 29501, 29503}))
    assert parse_probe("") == Probe((), frozenset())


@given(st.text(), st.sampled_from(["", "\n", ": 0: 00000000:", " a b 06 "]))
def test_no_answer_upsets_the_reading(text: str, between: str) -> None:
    assert parse_probe("10.0.0.1\n" + text + between + text).addresses == ("10.0.0.1",)


def test_a_greeting_of_the_shell_is_no_part_of_the_answer() -> None:
    assert parse_probe(f"Welcome to worker-0.\nNote: see docs: a b c\n{TOLD}") == parse_probe(TOLD)


def test_a_host_that_knows_no_addresses_of_its_own_has_none() -> None:
    assert parse_probe(TOLD.partition("\n")[2]) == Probe((), frozenset({29500, 29501, 29503}))


def test_the_address_is_one_that_the_name_leads_to_when_there_is_one() -> None:
    assert choose_address(["172.17.0.1", "10.0.0.5"], {"10.0.0.5"}, "a") == "10.0.0.5"
    assert choose_address(["10.0.0.5", "172.17.0.1"], set(), "a") == "10.0.0.5"
    assert choose_address(["10.0.0.5"], {"127.0.1.1"}, "a") == "10.0.0.5"
    assert choose_address([], {"10.0.0.5"}, "a") == "a"


@given(st.sets(st.integers(29500, 29520)))
def test_the_port_is_the_first_that_is_free(used: set[int]) -> None:
    port = choose_port(None, used, "a")
    assert port not in used
    assert set(range(29500, port)) <= used


def test_a_fixed_port_is_taken_or_refused_never_replaced() -> None:
    assert choose_port(5000, {29500}, "a") == 5000
    with pytest.raises(LaunchError, match="--master_port 5000 is in use on worker-3"):
        choose_port(5000, {5000}, "worker-3")
    with pytest.raises(LaunchError, match="no port"):
        choose_port(70000, set(), "a")
    with pytest.raises(LaunchError, match="29500 to 29699 are all in use on a"):
        choose_port(None, range(29500, 29700), "a")


def test_this_machine_tells_of_itself_without_ssh() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in probe("localhost", "hosts", by_ssh=False).used_ports


def test_a_host_out_of_reach_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="there is no ssh on this machine"):
        probe("a.invalid", "hosts", by_ssh=True)
    monkeypatch.undo()
    failing = probing.subprocess.CompletedProcess([], 255, "", "no route\n")
    monkeypatch.setattr(probing.subprocess, "run", lambda *_, **__: failing)
    with pytest.raises(LaunchError, match=r"Using hostfile at hosts but host=a was not reachable via ssh \(no route\)"):
        probe("a", "hosts", by_ssh=True)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_can_be_no_name_is_no_machine(host: str) -> None:
    assert not is_this_machine(host)
    assert addresses_of(host) == frozenset()


def test_names_and_addresses_of_this_machine_are_known_as_such() -> None:
    assert all(is_this_machine(host) for host in ("localhost", "127.0.0.1", socket.gethostname()))
    assert not any(is_this_machine(host) for host in ("worker-0.invalid", "192.0.2.1"))
