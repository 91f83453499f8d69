"""Do ranks wait for each other for ever? What each rank says of itself, and the judgement over what all of them said.

    rank 0: waits in call 7 of channel "0"   ---awaits---> those whose launched calls of "0" are fewer than 7: rank 1
    rank 1: waits in call 2 of channel "1"   ---awaits---> ... rank 0
    rank 2: in user code                                   a rank that is not waiting may still come: nothing is certain

A *channel* is a process group, or one direction between two ranks (messages). Its calls are numbered from 1 on each
rank. Two things are certain, however slow ranks are:

    parted      two ranks made different calls under one number of one channel
    deadlock    a set of waiting and ended ranks in which each waiting one awaits another of the set: none can ever go on
                (the largest such set is found by striking out, again and again, who awaits nobody of the set)

A rank that is late but not stuck in this sense is only slow, and no error.

[Note: two looks] Reports of ranks are not taken at one moment. So a deadlock is looked for only among ranks that
reported the same clock (their count of calls and waits begun and ended, and of work done for others) in an earlier look
and again in a report written since. All of them stood still at the moment of that earlier look, so their later reports
describe one moment. A rank that waits without the back end may work for others meanwhile, so it must also have looked
in between and found nothing.

Pure: no torch, no store. Does not live here: writing reports and carrying them (`comm.watch`, which calls this).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

__all__ = [
    "ANY_NBYTES",
    "Call",
    "ChannelReport",
    "Judge",
    "RankReport",
    "WaitReport",
    "deadlocked",
    "positions",
    "shortened",
]

ANY_NBYTES = -1
"""Bytes of a call that ranks may make with different sizes."""


@dataclass(frozen=True)
class Call:
    """One call of a collective: what, how many bytes (`ANY_NBYTES`: ranks may differ), and what the caller was doing."""

    operation: str
    nbytes: int = ANY_NBYTES
    name: str = ""

    def __str__(self) -> str:
        size = "" if self.nbytes <= 0 else f" of {self.nbytes} bytes"
        return f"{self.operation}{size}{f' ({self.name})' if self.name else ''}"

    def differs(self, other: Call) -> bool:
        """Whether two ranks cannot have meant the same call; names do not count, they only explain."""
        sizes = {self.nbytes, other.nbytes} - {ANY_NBYTES}
        return self.operation != other.operation or len(sizes) > 1


@dataclass(frozen=True)
class WaitReport:
    """A wait that goes on: in call `number` of `channel`, or (channel empty) for the ranks `awaits`.

    `is_foreign`: in a call on the group of `channel` that was made without `deepspeed.comm`, and so has no number.
    """

    call: Call
    channel: str
    number: int
    awaits: tuple[int, ...]
    seconds: float
    is_foreign: bool = False


@dataclass(frozen=True)
class ChannelReport:
    """Calls that a rank has made on a channel: how many, and the last of them, `recent[-1]` being number `launched`.

    `foreign` counts what the back end did on the group besides, for calls made without `deepspeed.comm`; `marks` has that
    count as it was at each of `recent`.
    """

    ranks: tuple[int, ...]
    launched: int
    recent: tuple[Call, ...]
    foreign: int = 0
    marks: tuple[int, ...] = ()

    def call(self, number: int) -> Call | None:
        """The call of that number, None when it is too old or was not made."""
        position = number - (self.launched - len(self.recent)) - 1
        return self.recent[position] if 0 <= position < len(self.recent) else None

    def foreign_since(self, number: int) -> int | None:
        """Foreign calls since call `number`, those right before the next one included; None when it is too old."""
        if number == 0:
            return self.foreign
        position = number - (self.launched - len(self.marks)) - 1
        return self.foreign - self.marks[position] if 0 <= position < len(self.marks) else None


@dataclass(frozen=True)
class RankReport:
    """What a rank says of itself.

    Attributes:
        rank: global rank.
        clock: calls and waits begun and ended so far.
        stamp: number of this report.
        looks: how often it found, waiting without the back end, that nothing had come.
        step: of training; -1 when nobody has said.
        waits: of its threads.
        is_waiting: every thread that ever made a call is in a wait.
        has_ended: no call will come any more; `place` says how it ended.
        place: where its code stands.
        last: the last call it made.
        channels: by key.
    """

    rank: int
    clock: int
    stamp: int
    looks: int = 0
    step: int = -1
    waits: tuple[WaitReport, ...] = ()
    is_waiting: bool = False
    has_ended: bool = False
    place: str = ""
    last: str = ""
    channels: Mapping[str, ChannelReport] = field(default_factory=dict)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankReport:
        """From what `to_text` gave."""
        values = json.loads(text)
        values["waits"] = tuple(
            WaitReport(**{**each, "call": Call(**each["call"]), "awaits": tuple(each["awaits"])}) for each in values["waits"]
        )
        values["channels"] = {
            key: ChannelReport(
                tuple(each["ranks"]),
                each["launched"],
                tuple(Call(**call) for call in each["recent"]),
                each["foreign"],
                tuple(each["marks"]),
            )
            for key, each in values["channels"].items()
        }
        return cls(**values)

    def late_seconds(self) -> float:
        """The longest of its waits."""
        return max((wait.seconds for wait in self.waits), default=0.0)

    def position(self) -> str:
        """Where it stands, in words that are equal for ranks that stand at the same place."""
        step = "" if self.step < 0 else f", step {self.step}"
        place = f", at {self.place}" if self.place else ""
        if self.has_ended:
            return f"has ended{place}; its last call was {self.last or 'none'}{step}"
        if not self.waits:
            return f"is not in a collective{place}; its last call was {self.last or 'none'}{step}"
        return " and ".join(self._wait_text(wait) for wait in self.waits) + step + place

    def _wait_text(self, wait: WaitReport) -> str:
        if not wait.channel:
            return f"waits in {wait.call} for rank(s) {shortened(wait.awaits)}"
        channel = self.channels.get(wait.channel)
        where = f"of ranks {shortened(channel.ranks)}" if channel else f"of {wait.channel}"
        if wait.is_foreign:
            return f"waits in {wait.call} {where}"
        return f"waits in {wait.call}, call {wait.number} {where}"


def shortened(ranks: Sequence[int], most: int = 16) -> str:
    """Ranks as text, many of them shortened."""
    return str(list(ranks)) if len(ranks) <= most else f"[{', '.join(map(str, ranks[:most]))}, ... {len(ranks)} in all]"


def positions(reports: Iterable[RankReport]) -> str:
    """Who stands where: one part per place, ranks at the same place together."""
    ranks_at: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda each: each.rank):
        ranks_at.setdefault(report.position(), []).append(report.rank)
    parts = (f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {shortened(ranks)}" for ranks in ranks_at.values())
    return "; ".join(f"{who} {where}" for who, where in zip(parts, ranks_at, strict=True))


class Judge:
    """Looks at the reports of all ranks again and again. [Note: two looks]"""

    def __init__(self, limit_seconds: float) -> None:
        """A wait shorter than `limit_seconds` is not asked about."""
        self._limit_seconds = limit_seconds
        self._before: dict[int, RankReport] = {}

    def look(self, reports: Mapping[int, RankReport]) -> str:
        """Return why the ranks cannot go on, in words for all of them; empty while that is not certain."""
        before = self._before
        self._before = dict(reports)
        late = [report for report in reports.values() if report.late_seconds() >= self._limit_seconds]
        if not late:
            return ""
        keys = dict.fromkeys(
            wait.channel for report in late for wait in report.waits if wait.channel and not wait.is_foreign
        )
        parting = next((text for key in keys if (text := _parting(key, reports))), "")
        if parting:
            return f"ranks do different things: {parting}. {positions(reports.values())}. {_CURE}"
        still = {rank: report for rank, report in reports.items() if _has_stood(before.get(rank), report)}
        stuck = deadlocked(still)
        if all(reports[rank].late_seconds() < self._limit_seconds for rank in stuck):
            return ""
        history = _first_difference(reports, stuck)
        return f"ranks wait for each other and can never go on: {positions(reports.values())}. {history}{_CURE}"


_CURE = (
    "All ranks of a group must make the same calls in the same order: look for code that depends on the rank or on its data "
    "(a module run more often, a loop of another length, an early end)."
)


def _has_stood(before: RankReport | None, now: RankReport) -> bool:
    if now.has_ended:
        return True
    if before is None or now.clock != before.clock or now.stamp <= before.stamp:
        return False
    is_looking = any(not wait.channel for wait in now.waits)  # then it could work for others while it waits
    return now.looks > before.looks or not is_looking


def deadlocked(reports: Mapping[int, RankReport]) -> set[int]:
    """The ranks of the largest deadlock, ended ones included; without a waiting rank among them there is none."""
    members = {rank for rank, report in reports.items() if report.has_ended or (report.waits and report.is_waiting)}
    while True:
        free = {rank for rank in members if not reports[rank].has_ended and not _is_held(reports[rank], reports, members)}
        if not free:
            return members
        members -= free


def _is_held(report: RankReport, reports: Mapping[int, RankReport], by: set[int]) -> bool:
    """Whether each wait of a rank awaits one of the ranks `by`."""
    return all(by.intersection(_awaited(wait, report, reports)) for wait in report.waits)


def _awaited(wait: WaitReport, report: RankReport, reports: Mapping[int, RankReport]) -> Iterable[int]:
    """Ranks that have not done yet what ends the wait, as far as they have reported."""
    if not wait.channel:
        return wait.awaits
    ranks = report.channels[wait.channel].ranks
    if wait.is_foreign:
        return [rank for rank in ranks if rank in reports and _lacks_foreign(reports[rank], report, wait.channel)]
    return [rank for rank in ranks if rank in reports and _launched(reports[rank], wait.channel) < wait.number]


def _lacks_foreign(other: RankReport, waiting: RankReport, key: str) -> bool:
    """Whether `other` has certainly not made the foreign call in which `waiting` waits on channel `key`.

    Calls of a group come in one order on all ranks. So it must come after the last counted call that both have made, and a
    rank whose back end did nothing foreign on the group since then has not made it.
    """
    theirs, mine = other.channels.get(key), waiting.channels[key]
    if theirs is None:
        return False  # nobody counts what it does on this group
    common = min(theirs.launched, mine.launched)
    return theirs.foreign_since(common) == 0 and bool(mine.foreign_since(common))


def _launched(report: RankReport, key: str) -> int:
    channel = report.channels.get(key)
    return 0 if channel is None else channel.launched


def _parting(key: str, reports: Mapping[int, RankReport]) -> str:
    """The first calls of one number on a channel that cannot be the same, in words; empty when there are none."""
    found = _first_pair(key, reports.values(), lambda one, other: one.differs(other))
    if found is None:
        return ""
    number, (rank, call), (other_rank, other_call) = found
    return f"as call {number} of their group rank {rank} made {call}, but rank {other_rank} {other_call}"


def _first_difference(reports: Mapping[int, RankReport], ranks: set[int]) -> str:
    """Where ranks of a deadlock began to do different things, as far as the names of their calls tell."""
    waits = [wait for rank in sorted(ranks) for wait in reports[rank].waits]
    keys = dict.fromkeys(wait.channel for wait in waits if wait.channel and not wait.is_foreign)
    for key in keys:
        found = _first_pair(key, (reports[rank] for rank in sorted(ranks)), lambda one, other: one != other)
        if found is not None:
            number, (rank, call), (other_rank, other_call) = found
            return f"They parted at call {number}: rank {rank} made {call}, rank {other_rank} {other_call}. "
    return ""


def _first_pair(
    key: str, reports: Iterable[RankReport], is_different: Callable[[Call, Call], bool]
) -> tuple[int, tuple[int, Call], tuple[int, Call]] | None:
    """The lowest number under which two ranks remember different calls: (number, (rank, call), (rank, call))."""
    told = [(report.rank, report.channels[key]) for report in reports if key in report.channels]
    first = min((channel.launched - len(channel.recent) + 1 for _, channel in told), default=1)
    last = max((channel.launched for _, channel in told), default=0)
    for number in range(first, last + 1):
        made = [(rank, call) for rank, channel in told if (call := channel.call(number)) is not None]
        for one in made[1:]:
            if is_different(made[0][1], one[1]):
                return number, made[0], one
    return None
