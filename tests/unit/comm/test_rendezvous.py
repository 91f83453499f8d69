"""Ranks at a store in memory, one thread each; the places of a network are tested with processes in tests/ranks."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from deepspeed.comm.patience import ProcessIdentity
from deepspeed.comm.rendezvous import Arrival, Notices, connect, meet, serve
from deepspeed.errors import CommError

LIMIT = timedelta(seconds=100)


def _hurried(said: list[str], step_seconds: float = 5.0) -> Notices:
    """Notices whose clock goes on by `step_seconds` at every look."""
    ticks = itertools.count()
    return Notices(LIMIT, said.append, lambda: next(ticks) * step_seconds)


def _arrival(rank: int, world_size: int = 3) -> Arrival:
    return replace(Arrival.here(rank, world_size), pid=1000 + rank, machine="elsewhere", host=f"node{rank}")


def test_ranks_that_all_come_go_on() -> None:
    store, said = HashStore(), list[str]()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(meet, store, _arrival(rank), Notices(LIMIT, said.append)) for rank in range(3)]
        assert [each.result(20) for each in waiting] == [None] * 3
    assert said == []


def test_who_is_missing_and_who_came_is_said_again_and_again_and_raised_at_the_end() -> None:
    store, said = HashStore(), list[str]()
    store.set("came/2", _arrival(2).to_text())
    with pytest.raises(CommError, match=r"rank 0 on node0 waits for rank 1 of 3, .* Gave up after 100 s"):
        meet(store, _arrival(0), _hurried(said))
    assert 2 <= len(said) <= 5, "at twice the age each time"
    assert all("waits for rank 1 of 3" in text and "rank 2 (process 1002 on node2)" in text for text in said)


def test_only_the_speaker_says_so_but_every_error_does() -> None:
    said = list[str]()
    with pytest.raises(CommError, match=r"waits for ranks \[0, 1\] of 3"):
        meet(HashStore(), _arrival(2), _hurried(said), is_speaker=False)
    assert said == []


def test_two_processes_with_one_rank_are_told_apart() -> None:
    store = HashStore()
    store.set("came/1", _arrival(1).to_text())
    twin = replace(_arrival(1), pid=7, host="node9")
    with pytest.raises(
        CommError, match=r"two processes were started as rank 1: process 1001 on node1, and this one, process 7"
    ):
        meet(store, twin, _hurried([]))
    with pytest.raises(CommError, match=r"Turned away.*rank 1 of 3 \(process 7 on node9\). Start every rank once"):
        meet(store, _arrival(0), _hurried([]))  # rank 2 will not come: it is the twin


def test_another_world_size_ends_both_sides() -> None:
    store = HashStore()
    store.set("world size", "3")
    with pytest.raises(CommError, match=r"rank 1 .*was started with WORLD_SIZE=4, but the job .* has 3 ranks"):
        meet(store, _arrival(1, 4), _hurried([]))
    store.set("came/2", _arrival(2).to_text())
    with pytest.raises(CommError, match=r"waits for rank 1 of 3.*Turned away.*rank 1 of 4"):
        meet(store, _arrival(0), _hurried([]))


def test_one_that_came_and_died_is_an_error_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity is not None
    here = Arrival.here(1, 3)
    dead = replace(here, pid=child.pid, start_ticks=identity.start_ticks)
    store, said = HashStore(), list[str]()
    store.set("came/1", dead.to_text())
    assert not dead.has_died()
    child.kill()
    child.communicate()
    with pytest.raises(CommError, match=rf"rank 1 \(process {child.pid} on .*\) came and has died since"):
        meet(store, _arrival(0), _hurried(said))
    assert said == []


def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CommError, match=rf"rank 0 cannot listen on 127.0.0.1:{port}: another process has that port"):
            serve("127.0.0.1", port, _arrival(0), LIMIT, _hurried([]))


def test_an_address_where_nobody_listens_and_a_name_that_nobody_knows_are_told_apart() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # does not listen
        port = unused.getsockname()[1]
        said = list[str]()
        with pytest.raises(CommError, match=rf"127.0.0.1:{port} cannot be reached: nobody listens there.*Gave up"):
            connect("127.0.0.1", port, _arrival(1), LIMIT, _hurried(said, 20.0))
    assert said
    with pytest.raises(CommError, match=r"the host name in node\.invalid:1 cannot be resolved"):
        connect("node.invalid", 1, _arrival(1), LIMIT, _hurried([], 60.0))


def test_a_service_that_is_no_store_is_settled() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(CommError, match=r"something listens at .*, but does not answer as the store of rank 0"):
            connect("127.0.0.1", silent.getsockname()[1], _arrival(1), timedelta(seconds=2), _hurried([], 60.0))
    for thread in threading.enumerate():
        if thread.name == "deepspeed rendezvous":  # in torch's own attempt, which ends with the socket or in two seconds
            thread.join(20)


def test_a_process_knows_itself() -> None:
    me = Arrival.here(2, 4)
    assert (me.rank, me.world_size, me.pid) == (2, 4, os.getpid())
    assert Arrival.from_text(me.to_text()) == me
    assert not me.has_died()
