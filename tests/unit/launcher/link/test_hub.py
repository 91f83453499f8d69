"""The hub as text: what it hears, and what it then does."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.hub import CloseListener, HangUp, Hub, HubAction, Say, Tell
from deepspeed.launcher.link.job import LinkedJob, linked_job
from deepspeed.launcher.link.messages import PROTOCOL, Beat, Done, Failed, Hello, Message, Stop, proof_of

JOB = linked_job({"a": [0, 1], "b": [0, 1], "c": [0]}, "10.0.0.1", 29500, "secret", has_front_end=False, is_per_rank=False)
VERSIONS = {"deepspeed": "1", "torch": "2.6.0"}
NAMES = "abcdef"  # of the peers, by number


class Play:
    """A hub, what happens to it, and the text of what it does."""

    def __init__(self, job: LinkedJob = JOB) -> None:
        self.hub = Hub(job, VERSIONS, 0.0, limit_seconds=60.0)
        self.now = 0.0

    def hello(self, number: int | None, name: str | None = None, **changes: object) -> list[str]:
        """Somebody calls, by default the member of that number, and says hello."""
        peer = NAMES.index(name or NAMES[number or 0])
        self.hub.connected(peer, f"nonce {peer}", self.now)
        fields: dict[str, object] = {
            "protocol": PROTOCOL,
            "member": number,
            "host": NAMES[peer],
            "pid": 1,
            "job": self.hub.job.description,
            "versions": VERSIONS,
            "proof": proof_of("secret", f"nonce {peer}"),
            **changes,
        }
        return self.says(NAMES[peer], Hello(**fields))  # type: ignore[arg-type]

    def says(self, name: str, message: Message) -> list[str]:
        return _as_text(self.hub.heard(NAMES.index(name), message, self.now))

    def goes(self, name: str, why: str = "killed") -> list[str]:
        return _as_text(self.hub.lost(NAMES.index(name), why, self.now))

    def at(self, now: float, speaking: str = "") -> list[str]:
        """Time comes to `now`; those of `speaking` have sent their beats."""
        self.now = now
        for name in speaking:
            assert self.says(name, Beat()) == []
        return [line for line in _as_text(self.hub.tick(now)) if ": beat" not in line]

    def start(self) -> None:
        for number in range(len(self.hub.job.hosts)):
            self.hello(number)


def _as_text(actions: Iterable[HubAction]) -> list[str]:
    return [_line(action) for action in actions]


def _line(action: HubAction) -> str:
    if isinstance(action, Tell):
        return f"tell {action.text}"
    if isinstance(action, CloseListener):
        return "close the listener"
    if isinstance(action, HangUp):
        return f"hang up {NAMES[action.peer]}"
    assert isinstance(action, Say)
    message = action.message
    what = type(message).__name__.lower()
    if isinstance(message, Stop):
        what += f" {message.cause.status} {message.cause.text}{', now' if message.is_now else ''}"
    if isinstance(message, Done) and message.is_settled:
        what += ", settled"
    return f"{NAMES[action.peer]}: {what}"


def test_all_start_when_all_are_there_and_the_port_is_free() -> None:
    play = Play()
    assert play.hello(1) == []
    assert play.hello(0) == []
    assert play.hello(2) == ["close the listener", "b: go", "a: go", "c: go"]


def test_all_leave_when_all_are_done() -> None:
    play = Play()
    play.start()
    assert play.says("a", Done()) == play.says("c", Done()) == []
    assert play.says("b", Done()) == ["a: done", "b: done", "c: done"]
    assert play.goes("a") == play.goes("b") == play.goes("c") == []
    assert play.hub.cause is None


def test_a_signal_ends_the_job_at_once() -> None:
    play = Play()
    play.start()
    cause = Cause(139, "rank 2 on host b failed", member=1)
    stop = "stop 139 rank 2 on host b failed"
    assert play.says("b", Failed(cause)) == [f"a: {stop}", f"b: {stop}", f"c: {stop}"]
    assert play.says("a", Failed(Cause(1, "an echo", may_be_echo=True))) == []
    assert play.says("a", Done()) == play.says("b", Done()) == []
    assert play.says("c", Done()) == ["a: done", "b: done", "c: done"]
    assert play.hub.cause == cause


def test_an_exit_status_waits_for_what_may_have_led_to_it() -> None:
    play = Play()
    play.start()
    assert play.says("a", Failed(Cause(1, "an echo", may_be_echo=True))) == []
    stop = "stop 137 rank 2 was killed"
    assert play.says("b", Failed(Cause(137, "rank 2 was killed"))) == [f"a: {stop}", f"b: {stop}", f"c: {stop}"]


def test_an_exit_status_that_nothing_led_to_is_the_cause_in_a_moment() -> None:
    play = Play()
    play.start()
    play.at(10.0, "abc")
    assert play.says("a", Failed(Cause(3, "first", may_be_echo=True))) == []
    assert play.says("b", Failed(Cause(4, "second", may_be_echo=True))) == []
    assert play.hub.next_time == pytest.approx(10.2)
    assert play.at(10.2) == ["a: stop 3 first", "b: stop 3 first", "c: stop 3 first"]


def test_a_launcher_that_vanishes_is_lost() -> None:
    play = Play()
    play.start()
    text = "stop 255 host b was lost: killed"
    assert play.goes("b") == [f"a: {text}", f"c: {text}"]
    assert play.says("a", Done()) == []
    assert play.says("c", Done()) == ["a: done", "c: done"]


def test_a_silent_host_is_lost_after_four_seconds() -> None:
    play = Play()
    play.start()
    for now in (1.0, 2.0, 3.0):
        assert play.at(now, "ac") == []
    text = "stop 255 host b was lost: not heard from for 4 s (its host is frozen, or the network to it is down)"
    assert play.at(4.0, "ac") == ["hang up b", f"a: {text}", f"c: {text}"]


def test_everybody_is_heard_before_silence_is_judged() -> None:
    play = Play()
    play.start()
    assert play.at(100.0, "abc") == []  # the hub itself had been stopped


def test_beats_go_out_every_second() -> None:
    play = Play()
    play.start()
    play.hub.tick(0.0)
    assert play.hub.next_time == 1.0
    assert _as_text(play.hub.tick(1.0)) == ["a: beat", "b: beat", "c: beat"]
    assert _as_text(play.hub.tick(1.5)) == []


def test_who_is_missing_is_said_after_a_few_seconds_and_now_and_then() -> None:
    play = Play()
    play.hello(0)
    play.at(2.0, "a")
    assert play.at(4.9, "a") == []
    assert play.at(5.0, "a") == ["tell 1 of 3 launchers are here after 5 s; waiting for host b, host c"]
    assert play.at(6.0, "a") == []
    play.hello(1)
    assert play.at(35.0, "ab") == ["tell 2 of 3 launchers are here after 35 s; waiting for host c"]
    assert play.at(60.0, "ab") == [
        f"{name}: stop 255 host c did not start within 60 s: see above what ssh or the scheduler said" for name in "ab"
    ]


def test_a_launcher_that_goes_before_the_start_may_come_again() -> None:
    play = Play()
    play.hello(0)
    play.hello(1)
    assert play.goes("b") == []
    assert play.hello(2) == []
    assert play.hello(1) == ["close the listener", "a: go", "c: go", "b: go"]


@pytest.mark.parametrize(
    ("number", "changes", "reason"),
    [
        (1, {"proof": "?"}, "it belongs to another job (another DS_JOB_TOKEN), which meets at the same port. Give one of"),
        (3, {}, "there is no member 3 in a job of 3: give each host its own --node_rank."),
        (0, {}, "host a (number 0) is here already: another launcher runs with the same number."),
    ],
)
def test_strangers_are_refused_and_change_nothing(number: int, changes: dict[str, object], reason: str) -> None:
    play = Play()
    play.hello(0)
    said = play.hello(number, "d", **changes)
    assert said[:2] == ["d: refused", "hang up d"]
    assert reason in said[2]
    assert play.hello(1) == []
    assert play.hello(2) == ["close the listener", "a: go", "b: go", "c: go"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"protocol": 0}, "it speaks version 0, the launcher of rank 0 2: install the same deepspeed on both."),
        (
            {"job": "a:2 b:1"},
            "its command names the hosts and slots a:2 b:1, the one on the host of rank 0 a:2 b:2 c:1: use",
        ),
        ({"versions": {**VERSIONS, "torch": "2.5.0"}}, "it has torch 2.5.0 (rank 0's host has 2.6.0): install the same"),
    ],
)
def test_a_member_that_cannot_take_part_ends_the_job_before_it_starts(changes: dict[str, object], fault: str) -> None:
    play = Play()
    play.hello(0)
    said = play.hello(1, **changes)
    assert said[:2] == ["b: refused", "hang up b"]
    assert said[3].startswith(f"a: stop 1 host b: {fault}")


def test_who_says_nothing_is_hung_up_on() -> None:
    play = Play()
    play.hub.connected(4, "nonce", 0.0)
    assert play.says("e", Beat())[:2] == ["e: refused", "hang up e"]
    play.hub.connected(5, "nonce", 0.0)
    assert play.at(4.9) == []
    assert play.at(5.0)[:2] == ["f: refused", "hang up f"]


FRONT = linked_job({"a": [0], "b": [0]}, "10.0.0.1", 29500, "secret", has_front_end=True, is_per_rank=False)


def test_the_front_end_is_waited_for_a_moment() -> None:
    play = Play(FRONT)
    play.hello(0)
    assert play.hello(1) == []
    assert play.at(0.5) == []
    assert play.hello(None, "e") == ["close the listener", "a: go", "b: go", "e: go"]


def test_a_job_starts_without_a_front_end_that_cannot_come() -> None:
    play = Play(FRONT)
    play.hello(0)
    play.hello(1)
    assert play.hub.next_time <= 1.0
    assert play.at(1.0) == ["close the listener", "a: go", "b: go"]


def _with_front_end() -> Play:
    play = Play(FRONT)
    play.hello(None, "e")
    play.start()
    return play


def test_the_front_end_stops_the_job_and_a_second_time_at_once() -> None:
    play = _with_front_end()
    cause = Cause(130, "received SIGINT", signum=2)
    assert play.says("e", Stop(cause)) == [f"{name}: stop 130 received SIGINT" for name in "abe"]
    assert play.says("e", Stop(cause)) == [f"{name}: stop 130 received SIGINT, now" for name in "abe"]


def test_only_the_front_end_may_stop_the_job() -> None:
    play = _with_front_end()
    assert play.says("b", Stop(Cause(130, "received SIGINT"))) == []
    assert play.says("e", Failed(Cause(130, "received SIGINT"))) == []


def test_a_front_end_that_is_gone_ends_the_job() -> None:
    play = _with_front_end()
    assert play.goes("e") == [f"{name}: stop 143 the deepspeed command that started the job is gone" for name in "ab"]


def test_a_silent_front_end_is_none_that_is_gone() -> None:
    play = _with_front_end()
    assert play.at(100.0, "ab") == []


def test_a_silent_front_end_is_talked_to_again_when_it_speaks() -> None:
    play = _with_front_end()
    play.at(100.0, "ab")
    assert {line[0] for line in _as_text(play.hub.tick(101.0))} == {"a", "b"}, "beats for it would fill its connection"
    play.says("e", Beat())
    assert {line[0] for line in _as_text(play.hub.tick(102.0))} == {"a", "b", "e"}


def test_a_late_launcher_hears_that_the_job_ends() -> None:
    play = Play(FRONT)
    play.hello(None, "e")
    play.hello(0)
    play.says("e", Stop(Cause(130, "received SIGINT")))
    assert play.hello(1) == ["b: stop 130 received SIGINT"]


def test_a_host_that_does_not_get_done_is_not_waited_for_for_ever() -> None:
    play = _with_front_end()
    play.says("e", Stop(Cause(130, "received SIGINT")))
    play.says("a", Done())
    assert play.at(11.9, "ab") == []
    assert play.at(12.0, "ab") == ["a: done", "b: done", "e: done"]


def test_members_hear_at_the_end_whether_all_are_done_and_the_front_end_knows_why() -> None:
    play = _with_front_end()
    play.says("b", Failed(Cause(139, "rank 1 crashed", 1)))
    play.says("a", Done())
    assert play.says("b", Done()) == ["a: done, settled", "b: done, settled", "e: done, settled"]
    play = _with_front_end()
    play.goes("e")
    play.says("a", Done())
    assert play.says("b", Done()) == ["a: done", "b: done"]
    play = _with_front_end()
    play.goes("b")
    assert play.says("a", Done()) == ["a: done", "e: done"]


def test_members_that_share_a_host_are_told_apart() -> None:
    job = linked_job({"a": [0, 1], "b": [0]}, "a", 1, "", has_front_end=False, is_per_rank=True)
    assert [job.name_of(member) for member in range(3)] == ["rank 0 on host a", "rank 1 on host a", "host b"]


def test_a_large_job_is_described_shortly_and_told_from_another() -> None:
    def described(count: int) -> str:
        world = {f"host-{number}": [0, 1] for number in range(count)}
        return linked_job(world, "a", 1, "", has_front_end=False, is_per_rank=False).description

    assert len(described(5000)) < 300
    assert described(5000) != described(5001)
