"""A hub and its members against each other, with time and faults of our own: every job ends, in time, for one cause."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.hub import CloseListener, HangUp, Hub, HubAction, Say, Tell
from deepspeed.launcher.link.job import linked_job
from deepspeed.launcher.link.member import Member
from deepspeed.launcher.link.messages import Message, decode, encode

STEP_SECONDS = 0.05
GRACE_SECONDS = 3.0  # what ranks may take to end
UNREACHABLE_SECONDS = 10.0
REACHABLE_SECONDS = 5.0


@dataclass
class Node:
    """A host with one launcher; the hub's is number 0."""

    number: int | None
    member: Member
    ends_in: float  # what its ranks take to end
    to_hub: deque[Message | None] = field(default_factory=deque)  # None: the end of the connection
    from_hub: deque[Message | None] = field(default_factory=deque)
    is_dead: bool = False
    is_frozen: bool = False
    is_cut: bool = False
    stops_since: float | None = None
    has_said_done: bool = False
    over_at: float | None = None

    @property
    def is_well(self) -> bool:
        return not (self.is_dead or self.is_frozen or self.is_cut)


class World:
    def __init__(self, ends_in: list[float], has_front_end: bool) -> None:
        world = {f"host{number}": [0] for number in range(len(ends_in))}
        job = linked_job(world, "host0", 1, "token", has_front_end=has_front_end, is_per_rank=False)
        self.now = 0.0
        self.hub = Hub(job, {}, 0.0, 60.0)
        numbers: list[tuple[int | None, float]] = list(enumerate(ends_in))
        numbers += [(None, 0.0)] if has_front_end else []
        self.nodes = [
            Node(number, Member(number, "host0", f"host{number}", 1, job.description, {}, "token"), seconds)
            for number, seconds in numbers
        ]
        for peer in range(len(self.nodes)):
            self._carry_out(self.hub.connected(peer, "nonce", 0.0))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_SECONDS
            for node in self.nodes:
                self._live(node)
            if self.nodes[0].is_well or self.nodes[0].is_cut:
                for peer, node in enumerate(self.nodes):
                    while node.to_hub and not self._is_apart(node):
                        message = node.to_hub.popleft()
                        heard = self.hub.lost(peer, "killed", self.now) if message is None else None
                        self._carry_out(self.hub.heard(peer, message, self.now) if message is not None else heard or [])
                self._carry_out(self.hub.tick(self.now))

    def _is_apart(self, node: Node) -> bool:
        return node.number != 0 and (node.is_cut or self.nodes[0].is_cut)

    def _live(self, node: Node) -> None:
        if node.is_dead or node.is_frozen:
            return
        while node.from_hub and not self._is_apart(node):
            message = node.from_hub.popleft()
            if message is None:
                node.member.lost("killed")
            else:
                node.to_hub += node.member.heard(message, self.now)
        node.to_hub += node.member.tick(self.now)
        if node.member.cause is not None and node.stops_since is None:
            node.stops_since = self.now
        wait = 0.0 if node.member.is_hurried else node.ends_in
        if node.stops_since is not None and not node.has_said_done and self.now >= node.stops_since + wait:
            node.has_said_done = True
            node.to_hub += node.member.done()
        if node.member.is_over and node.over_at is None and (node.has_said_done or node.member.cause is None):
            node.over_at = self.now

    def _carry_out(self, actions: list[HubAction]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self.nodes[action.peer].from_hub.append(decode(encode(action.message)))
            elif isinstance(action, HangUp):
                self.nodes[action.peer].from_hub.append(None)
            else:
                assert isinstance(action, (CloseListener, Tell))

    def break_down(self, kind: str, node: Node) -> None:
        if kind == "exits":
            node.to_hub += node.member.failed(Cause(3, f"rank {node.number} exits", node.number, may_be_echo=True))
        elif kind == "crashes":
            node.to_hub += node.member.failed(Cause(139, f"rank {node.number} crashes", node.number))
        elif kind == "is killed":
            node.is_dead = True
            node.to_hub.append(None)
            if node.number == 0:
                for other in self.nodes:
                    other.from_hub.append(None)
        elif kind == "freezes":
            node.is_frozen = True
        elif kind == "is cut off":
            node.is_cut = True


faults = st.tuples(
    st.sampled_from(["exits", "crashes", "is killed", "freezes", "is cut off"]), st.integers(0, 3), st.floats(0, 6)
)


@given(
    ends_in=st.lists(st.floats(0, GRACE_SECONDS), min_size=2, max_size=4),
    has_front_end=st.booleans(),
    happens=st.lists(faults, min_size=1, max_size=3),
)
@example(ends_in=[3.0, 3.0, 3.0], has_front_end=True, happens=[("freezes", 0, 0.0)])
@example(ends_in=[3.0, 3.0, 3.0], has_front_end=True, happens=[("is cut off", 0, 0.0)])
@example(ends_in=[3.0, 3.0], has_front_end=False, happens=[("is cut off", 1, 0.0), ("exits", 0, 0.0)])
def test_every_job_that_breaks_ends_everywhere_in_time_for_one_cause(
    ends_in: list[float], has_front_end: bool, happens: list[tuple[str, int, float]]
) -> None:
    world = World(ends_in, has_front_end)
    world.run(1.0)
    assert all(node.member.may_start for node in world.nodes if node.number is not None)
    began = world.now
    for kind, number, pause in happens:
        world.break_down(kind, world.nodes[number % len(ends_in)])
        world.run(pause)
    last = world.now
    world.run(UNREACHABLE_SECONDS + 1)
    is_unreachable = any(node.is_frozen or node.is_cut for node in world.nodes)
    limit = UNREACHABLE_SECONDS if is_unreachable else REACHABLE_SECONDS
    for node in world.nodes:
        if not node.is_dead and not node.is_frozen:  # who is cut off clears up as well
            assert node.over_at is not None
            assert node.over_at <= last + limit
            assert node.member.cause is not None
            assert node.stops_since is not None
            assert node.stops_since >= began
    is_hub_sound = not any(kind not in ("exits", "crashes") and number % len(ends_in) == 0 for kind, number, _ in happens)
    assert len({node.member.cause for node in world.nodes if node.is_well}) <= 1 or not is_hub_sound
    for node in world.nodes:
        node.is_frozen = False
    world.run(UNREACHABLE_SECONDS)
    assert all(node.over_at is not None for node in world.nodes if not node.is_dead)


@given(ends_in=st.lists(st.floats(0, GRACE_SECONDS), min_size=2, max_size=4), has_front_end=st.booleans())
def test_a_job_whose_ranks_all_end_well_ends_without_a_cause(ends_in: list[float], has_front_end: bool) -> None:
    world = World(ends_in, has_front_end)
    world.run(1.5)
    for node in world.nodes:
        if node.number is not None:
            node.to_hub += node.member.done()
            world.run(node.ends_in)
    world.run(0.2)
    assert all(node.member.is_over and node.member.cause is None for node in world.nodes)


def test_a_crash_is_the_cause_and_not_the_exits_that_it_leads_to() -> None:
    world = World([0.0, 0.0, 0.0], has_front_end=True)
    world.run(1.0)
    world.break_down("exits", world.nodes[0])
    world.run(STEP_SECONDS)
    world.break_down("crashes", world.nodes[2])
    world.run(1.0)
    assert {node.member.cause.status for node in world.nodes if node.member.cause is not None} == {139}
    assert all(node.member.is_over for node in world.nodes)
