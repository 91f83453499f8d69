"""The link on real sockets: whatever strangers and broken launchers do, a job starts and ends, and no secret gets out.

The hub and its members share one loop of this thread, and a clock that the tests advance.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.client import MemberLink
from deepspeed.launcher.link.job import LinkedJob, linked_job
from deepspeed.launcher.link.member import Member
from deepspeed.launcher.link.messages import PROTOCOL, Beat, Failed, Greeting, Hello, decode, encode, proof_of
from deepspeed.launcher.link.server import HubServer
from deepspeed.launcher.loop import Loop

TOKEN = "the token of the job"
LIMIT_SECONDS = 60.0
STRANGER_SECONDS = 5.0
SILENT_SECONDS = 4.0

GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: node1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\n",  # TLS
    b"\0" * 100_000,
    b"\n\n\n",
    b'{"say": "hello"}\n',
    b'{"say": "go"}\n',
    b'{"say": "done"}\n{"say": "done"}\n',
    b'{"say": "stop", "cause": {"status": 7, "text": "end"}, "is_now": true}\n',
    encode(Hello(PROTOCOL, 1, "node2", 1, "a:1 b:1", {}, "no proof")).replace(b"no proof", b"\\ud800"),
    encode(Hello(PROTOCOL, 1, "node2", 1, "a:1 b:1", {}, proof_of("a guess", "nonce"))),
    encode(Hello(PROTOCOL, None, "node2", 1, "a:1 b:1", {}, proof_of("", ""))),
]


class World:
    """A job of two hosts, a and b, on a port of this machine."""

    def __init__(self, loop: Loop, port: int, token: str = TOKEN) -> None:
        self.loop = loop
        self.now = 0.0
        self.job = self.job_with(token, port)
        self.links: list[MemberLink] = []

    @staticmethod
    def job_with(token: str, port: int) -> LinkedJob:
        return linked_job({"a": [0], "b": [0]}, "127.0.0.1", port, token, has_front_end=False, is_per_rank=False)

    def hub(self) -> HubServer:
        server = HubServer(self.job, {}, LIMIT_SECONDS, self.loop, self.clock)
        self.join(0, self.job, server)
        return server

    def join(self, number: int, job: LinkedJob | None = None, server: HubServer | None = None) -> MemberLink:
        job = job or self.job
        member = Member(number, "a", "ab"[number], 1, job.description, {}, job.token)
        self.links.append(MemberLink(job, member, self.loop, LIMIT_SECONDS, server, self.clock))
        return self.links[-1]

    def clock(self) -> float:
        return self.now

    def until(self, claim: Callable[[], bool], what: str, *, pace: float = 0.0) -> None:
        """Live until `claim` holds; each round takes `pace` seconds of the job's own time."""
        deadline = time.monotonic() + 10
        while not claim():
            assert time.monotonic() < deadline, f"not so: {what}"
            self.now += pace
            self.loop.wait(time.monotonic() + 0.005)
            for link in self.links:
                link.tick()

    def starts(self) -> None:
        """All launchers that belong to the job are taken in."""
        self.until(lambda: all(link.may_start for link in self.links), "the job starts", pace=0.02)


@pytest.fixture
def world() -> Iterator[World]:
    with Loop() as loop:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        world = World(loop, port)
        yield world
        for link in world.links:
            link.close()


@contextlib.contextmanager
def _stranger(world: World) -> Iterator[socket.socket]:
    with socket.create_connection((world.job.address, world.job.port), 5) as sock:
        sock.setblocking(False)
        yield sock


def _heard_to_the_end(world: World, sock: socket.socket, *, pace: float = 0.0) -> bytes:
    """All that the other side says until it hangs up."""
    told = b""
    is_over = False

    def has_ended() -> bool:
        nonlocal told, is_over
        with contextlib.suppress(BlockingIOError):
            try:
                chunk = sock.recv(65536)
            except ConnectionResetError:
                chunk = b""
            told, is_over = told + chunk, not chunk
        return is_over

    world.until(has_ended, "the other side hangs up", pace=pace)
    return told


def test_a_job_starts_and_ends_over_a_port(world: World) -> None:
    world.hub()
    world.join(1)
    world.starts()
    with pytest.raises(ConnectionRefusedError):  # the port is free for rank 0
        socket.create_connection((world.job.address, world.job.port), 5)
    cause = Cause(7, "rank 1 on host b failed", member=1)
    world.links[1].failed(cause)
    world.until(lambda: world.links[0].cause == cause, "the hub's launcher hears why")
    for link in world.links:
        link.done()
    world.until(lambda: all(link.is_over for link in world.links), "all leave together")


@pytest.mark.parametrize("garbage", GARBAGE, ids=[repr(each[:24]) for each in GARBAGE])
def test_garbage_is_hung_up_on_and_the_job_starts(world: World, garbage: bytes) -> None:
    world.hub()
    with _stranger(world) as sock:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            for _ in range(20):
                sock.send(garbage)
        told = _heard_to_the_end(world, sock)
    assert TOKEN.encode() not in told
    assert isinstance(decode(told.split(b"\n")[0]), Greeting)
    world.join(1)
    world.starts()


def test_a_message_that_is_cut_off_changes_nothing_before_the_start(world: World) -> None:
    world.hub()
    with _stranger(world) as sock:
        world.until(lambda: bool(_peeked(sock)), "the hub greets")
        greeting = decode(_peeked(sock).split(b"\n")[0])
        assert isinstance(greeting, Greeting)
        hello = encode(Hello(PROTOCOL, 1, "b", 1, world.job.description, {}, proof_of(TOKEN, greeting.nonce)))
        sock.send(hello[: len(hello) // 2])
    world.join(1)
    world.starts()


def _peeked(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def test_a_launcher_that_dies_amid_a_message_is_lost(world: World) -> None:
    world.hub()
    with _stranger(world) as sock:
        world.until(lambda: bool(_peeked(sock)), "the hub greets")
        greeting = decode(_peeked(sock).split(b"\n")[0])
        assert isinstance(greeting, Greeting)
        sock.send(encode(Hello(PROTOCOL, 1, "b", 1, world.job.description, {}, proof_of(TOKEN, greeting.nonce))))
        world.starts()
        sock.send(encode(Failed(Cause(7, "rank 1 failed", member=1)))[:40])
    world.until(lambda: world.links[0].cause is not None, "the hub notices")
    cause = world.links[0].cause
    assert cause is not None
    assert cause.status == 255
    assert cause.text.startswith("host b was lost: ")


def test_a_launcher_that_falls_silent_is_lost(world: World) -> None:
    world.hub()
    silent = world.join(1)
    world.starts()
    world.links.remove(silent)
    world.until(lambda: world.links[0].cause is not None, "the hub notices", pace=0.1)
    cause = world.links[0].cause
    assert cause is not None
    assert cause.text.startswith("host b was lost: not heard from for 4 s")
    silent.close()


def test_a_caller_that_never_speaks_is_hung_up_on_and_the_job_starts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.hub()
    with _stranger(world) as sock:
        world.until(lambda: bool(_peeked(sock)), "the hub greets")
        began = world.now
        told = _heard_to_the_end(world, sock, pace=0.1)
        assert STRANGER_SECONDS <= world.now - began < STRANGER_SECONDS + 1.5
    assert b"said nothing" in told
    assert "refused a caller at the port where the ranks meet: said nothing" in caplog.text
    world.join(1)
    world.starts()


def test_a_launcher_with_another_token_is_refused_and_the_job_starts(world: World) -> None:
    world.hub()
    other = world.join(1, World.job_with("another token", world.job.port))
    world.until(lambda: other.is_over, "the hub refuses it")
    assert other.cause is not None
    assert other.cause.status == 1
    assert "another job (another DS_JOB_TOKEN)" in other.cause.text
    assert TOKEN not in other.cause.text
    world.links.remove(other)
    other.close()
    world.join(1)
    world.starts()


def test_more_callers_than_there_are_descriptors_hold_the_job_up_for_a_moment_only(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.hub()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.create_connection((world.job.address, world.job.port), 5) for _ in range(8)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (strangers[-1].fileno() + 4, hard))  # three more, and no further
        world.until(lambda: "could not be answered" in caplog.text, "descriptors run out", pace=0.01)
        began = world.now
        world.until(lambda: world.now > began + 2, "two seconds pass", pace=0.02)
        assert caplog.text.count("could not be answered") <= 4, "once a second"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sock in strangers:
            sock.close()
    world.join(1)
    world.starts()


@pytest.mark.parametrize("said", [b"", *GARBAGE, encode(Beat()) * 3], ids=repr)
def test_a_launcher_that_meets_a_stranger_calls_again_until_its_time_is_over(world: World, said: bytes) -> None:
    with socket.create_server((world.job.address, world.job.port)) as stranger:
        stranger.setblocking(False)
        link = world.join(1)
        met: list[socket.socket] = []
        heard = b""

        def gives_up() -> bool:
            nonlocal heard
            with contextlib.suppress(BlockingIOError):
                met.append(stranger.accept()[0])
                met[-1].setblocking(False)
                met[-1].send(said)
            for sock in met:
                with contextlib.suppress(BlockingIOError, ConnectionResetError):
                    heard += sock.recv(65536)
            return link.is_over

        world.until(gives_up, "it gives up", pace=0.25)
        for sock in met:
            sock.close()
    assert len(met) > 3
    assert heard == b"", "nobody tells a stranger anything"
    assert link.cause is not None
    assert link.cause.status == 255
    assert f"could not reach the launcher of rank 0 at 127.0.0.1:{world.job.port} (host a)" in link.cause.text
    assert "no launcher of this job" in link.cause.text


def test_a_launcher_that_is_greeted_by_an_impostor_keeps_its_token_to_itself(world: World) -> None:
    with socket.create_server((world.job.address, world.job.port)) as impostor:
        impostor.setblocking(False)
        link = world.join(1)
        met: list[socket.socket] = []

        def comes() -> bool:
            with contextlib.suppress(BlockingIOError):
                met.append(impostor.accept()[0])
            return bool(met)

        world.until(comes, "it calls", pace=0.01)
        with met[0] as sock:
            sock.setblocking(False)
            sock.send(encode(Greeting(1, "nonce")))
            world.until(lambda: b"hello" in _peeked(sock), "it says who it is")
            assert TOKEN.encode() not in _peeked(sock)
            assert not link.may_start
    world.until(lambda: link.is_over, "it sees that the impostor is gone")
    assert link.cause is not None
    assert link.cause.status == 255
