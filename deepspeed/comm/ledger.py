"""What this rank has called and where it waits, kept so cheaply that every collective can afford it.

    comm.collectives --launch--> channel of the group: its count, its last calls       two counters and a tuple per call
                     --wait----> waits[thread]: which call, since when                  one entry per blocking wait
    shared memory    --late----> waits[thread]: which call, for which ranks             only in waits that last
    comm.meeting     --report--> a `RankReport` of all this                             only when some rank is late
    torch's own call --frame---> seen where it blocks; the back end has counted it      looked for once a second or so

Lives here: the records of one process. Does not live here: carrying them to the other ranks (`comm.meeting`), judging them
(`comm.divergence`), blocking (`comm.watch`, which owns the one ledger).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

import torch
import torch.distributed as dist

from deepspeed.comm.divergence import Call, ChannelReport, RankReport, WaitReport

__all__ = ["Channel", "Ledger", "Wait"]

_RECENT_CALLS = 32
_KNOWN_RUNS = 4096
_RENEWED_SECONDS = 2.0
_LIBRARIES = tuple(os.path.dirname(os.path.dirname(path)) + os.sep for path in (__file__, torch.__file__ + "/"))
_LIBRARIES += (os.path.dirname(threading.__file__) + os.sep,)
_HERE = os.path.dirname(__file__) + os.sep
_TORCH_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep


class Channel:
    """A process group as this rank uses it, or one direction between two ranks: calls counted from 1.

    Attributes:
        key: equal on all its ranks.
        ranks: global ranks whose calls belong together.
        is_blocking: waits for its collectives block the caller and may be cut into slices (gloo).
        launched: calls made.
        recent: the last of them, as (operation, bytes, name).
        asked: calls that the ranks agreed on before they made them.
        known: runs of calls after which the last needs no agreement any more.
        marks: for each of `recent`, how many foreign calls (made without `deepspeed.comm`) came before.
    """

    __slots__ = (
        "_foreign",
        "_open",
        "_own",
        "_sequence",
        "asked",
        "is_blocking",
        "key",
        "known",
        "launched",
        "marks",
        "ranks",
        "recent",
    )

    def __init__(
        self, key: str, ranks: Sequence[int], *, is_blocking: bool, sequence: Callable[[], int] | None = None
    ) -> None:
        """A new channel; `sequence` counts everything that the back end did for the group."""
        self.key = key
        self.ranks = tuple(ranks)
        self.is_blocking = is_blocking
        self.launched = 0
        self.recent: deque[tuple[str, int, str]] = deque(maxlen=_RECENT_CALLS)
        self.asked = 0
        self.known: set[tuple[str | int, ...]] = set()
        self.marks: deque[int] = deque(maxlen=_RECENT_CALLS)
        self._sequence = sequence
        self._own = 0 if sequence is None else sequence()
        self._foreign = 0
        self._open = 0

    def enter(self) -> None:
        """A call of ours begins to use the back end: what was done there since the last one is foreign."""
        if self._sequence is not None:
            if not self._open:
                self._foreign = self._sequence() - self._own
            self._open += 1

    def leave(self) -> None:
        """What `enter` opened is over, or has been handed to the back end: all of it was ours."""
        if self._sequence is not None:
            self._open -= 1
            if not self._open:
                self._own = self._sequence() - self._foreign

    def foreign(self) -> int:
        """Foreign calls so far."""
        return self._foreign if self._sequence is None or self._open else self._sequence() - self._own

    def is_new(self) -> bool:
        """Whether the last call follows the two before it for the first time; from now on it does not."""
        run = tuple(part for call in list(self.recent)[-3:] for part in call[:2])
        if run in self.known or len(self.known) >= _KNOWN_RUNS:
            return False
        self.known.add(run)
        return True


class Wait:
    """One call and, while a thread blocks on it, since when. `channel` None: for the ranks `awaits`, renewed by looks.

    `place` says which frame of a foreign call blocks, and where in it; None for calls that are counted.
    """

    __slots__ = ("awaits", "call", "channel", "number", "place", "renewed", "since")

    def __init__(
        self, call: tuple[str, int, str], channel: Channel | None, number: int = 0, awaits: Sequence[int] = ()
    ) -> None:
        self.call = call
        self.channel = channel
        self.number = number
        self.awaits = awaits
        self.since = 0.0
        self.renewed = 0.0
        self.place: tuple[int, int] | None = None


class Ledger:
    """The records of one process. Calls come from the threads that make collectives, `report` from the watching one.

    Attributes:
        name: what the caller is doing: module, bucket; goes into each record.
        step: of training; -1 when nobody says.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Store this process's global rank; the clock is a parameter for tests."""
        self.rank = rank
        self.name = ""
        self.step = -1
        self._time = clock
        self._channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
        self._messages: dict[str, Channel] = {}
        self._message_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self._waits: dict[int, Wait] = {}
        self._foreign: dict[int, Wait] = {}
        self._threads: set[int] = set()
        self._last: tuple[str, int, str] | None = None
        self._clock = 0
        self._stamp = 0
        self._looks = 0

    # -- written by the threads that make calls ------------------------------------------------------------------------

    def channel(self, group: dist.ProcessGroup) -> Channel:
        """The channel of a group of which this process is a rank."""
        found = self._channels.get(group)
        if found is None:
            is_blocking = dist.get_backend(group) == "gloo"
            sequence = getattr(group, "_get_sequence_number_for_group", None) if is_blocking else None
            ranks = dist.get_process_group_ranks(group)
            found = Channel(group.group_name, ranks, is_blocking=is_blocking, sequence=sequence)
            self._channels[group] = found
        return found

    def messages(self, group: dist.ProcessGroup, source: int, destination: int) -> Channel:
        """The channel of messages from one global rank to another."""
        key = f"{group.group_name}: {source} to {destination}"
        if key not in self._messages:
            self._message_groups.add(group)
            ranks = (source, destination)
            self._messages[key] = Channel(key, ranks, is_blocking=dist.get_backend(group) == "gloo")
        return self._messages[key]

    def named(self, name: str, ranks: Sequence[int]) -> Channel:
        """The channel of what ranks do together outside any group of theirs, as making one."""
        key = f"{name} of {list(ranks)}"
        if key not in self._messages:
            self._messages[key] = Channel(key, ranks, is_blocking=True)
        return self._messages[key]

    def blocking_groups(self) -> list[dist.ProcessGroup]:
        """The gloo groups that made calls here."""
        groups = [group for group, channel in self._channels.items() if channel.is_blocking]
        return groups + [group for group in self._message_groups if group not in groups]

    def launch(self, channel: Channel, operation: str, nbytes: int, *, is_message: bool = False) -> Wait:
        """Count a call that has been started, and return its record for a wait."""
        call = (operation, nbytes, self.name)
        channel.launched = number = channel.launched + 1
        if not is_message:  # the two ends of a message make different calls
            channel.recent.append(call)
            channel.marks.append(channel.foreign())
        self._last = call
        self._threads.add(threading.get_ident())
        self._clock += 1
        return Wait(call, channel, number)

    def withdraw(self, wait: Wait) -> None:
        """Uncount the last call of its channel: it was refused before it began."""
        assert wait.channel is not None  # made by `launch`
        wait.channel.launched -= 1
        if wait.channel.recent and wait.channel.recent[-1] is wait.call:
            wait.channel.recent.pop()
            wait.channel.marks.pop()
        self._clock += 1

    def begin(self, wait: Wait) -> None:
        """This thread blocks on `wait` from now on."""
        wait.since = self._time()
        self._waits[threading.get_ident()] = wait
        self._clock += 1

    def end(self) -> None:
        """This thread goes on."""
        self._waits.pop(threading.get_ident(), None)
        self._clock += 1

    def late(self, operation: str, awaits: Sequence[int], waited_seconds: float) -> None:
        """This thread blocks since `waited_seconds` until the global ranks `awaits` do their part; said again while it does.

        A wait that is not said again within two seconds is over.
        """
        me, now = threading.get_ident(), self._time()
        wait = self._waits.get(me)
        since = now - waited_seconds
        is_same = wait is not None and wait.channel is None and wait.call[0] == operation and abs(wait.since - since) < 0.05
        if wait is None or not is_same:
            wait = Wait((operation, -1, self.name), None)
            wait.since = since
            self._threads.add(me)
            self._clock += 1
        wait.awaits, wait.renewed = tuple(awaits), now
        self._waits[me] = wait
        self._looks += 1

    def worked(self) -> None:
        """This thread did for others what they wait for, between two calls of `late`."""
        self._clock += 1

    # -- read by the watching thread -----------------------------------------------------------------------------------

    def late_seconds(self) -> float:
        """How long the longest wait has lasted, those in foreign calls included; 0 without one."""
        now = self._time()
        waits = [*self._current_waits(now).values(), *self._foreign_waits(now, sys._current_frames()).values()]
        return max((now - wait.since for wait in waits), default=0.0)

    def is_waiting_here(self) -> bool:
        """Whether a thread waits in a call that is counted."""
        return bool(self._current_waits(self._time()))

    def report(self) -> RankReport:
        """All this as one moment of it: a rank that moved meanwhile is reported as not waiting."""
        clock, now = self._clock, self._time()
        frames = sys._current_frames()
        waits = self._current_waits(now) | self._foreign_waits(now, frames)
        channels = {channel.key: _told(channel) for channel in [*self._channels.values(), *self._messages.values()]}
        blocked = {*waits}
        self._stamp += 1
        return RankReport(
            rank=self.rank,
            clock=clock + sum(channel.foreign for channel in channels.values()),
            stamp=self._stamp,
            looks=self._looks,
            step=self.step,
            waits=tuple(_said(wait, now) for wait in waits.values()),
            is_waiting=self._threads.intersection(frames) <= blocked and clock == self._clock,
            place=_place(frames.get(next(iter(blocked), threading.main_thread().ident or 0))),
            last="" if self._last is None else str(Call(*self._last)),
            channels=channels,
        )

    def farewell(self) -> RankReport:
        """The last report: no call will come any more."""
        error = getattr(sys, "last_type", None)  # set when an exception ends the interpreter
        return RankReport(
            rank=self.rank,
            clock=self._clock,
            stamp=self._stamp + 1,
            step=self.step,
            has_ended=True,
            place="" if error is None else f"its script's {error.__name__}: {getattr(sys, 'last_value', '')}"[:200],
            last="" if self._last is None else str(Call(*self._last)),
            channels={channel.key: _told(channel) for channel in [*self._channels.values(), *self._messages.values()]},
        )

    def _current_waits(self, now: float) -> dict[int, Wait]:
        waits = self._waits.copy()  # one step for the interpreter: the others may write meanwhile
        return {thread: wait for thread, wait in waits.items() if wait.channel or now - wait.renewed < _RENEWED_SECONDS}

    def _foreign_waits(self, now: float, frames: Mapping[int, FrameType]) -> dict[int, Wait]:
        """Threads that block in a call of torch.distributed itself. Called by the watching thread alone."""
        found = {}
        for thread in {threading.main_thread().ident or 0, *self._threads} - {*self._waits}:
            frame = frames.get(thread)
            outer = None if frame is None else _torch_call(frame)
            if frame is None or outer is None:
                continue
            place, before = (id(frame), frame.f_lasti), self._foreign.get(thread)
            found[thread] = before if before is not None and before.place == place else self._foreign_wait(outer, place, now)
        self._foreign = found
        return {thread: wait for thread, wait in found.items() if wait.channel is not None}

    def _foreign_wait(self, frame: FrameType, place: tuple[int, int], now: float) -> Wait:
        group = frame.f_locals.get("group") or dist.group.WORLD
        channel = self.channel(group) if isinstance(group, dist.ProcessGroup) else None
        is_counted = channel is not None and channel.is_blocking
        wait = Wait((f"torch.distributed.{frame.f_code.co_name}", -1, ""), channel if is_counted else None)
        wait.place, wait.since = place, now
        return wait


def _torch_call(frame: FrameType) -> FrameType | None:
    """The frame of the function of torch.distributed that blocks here; None where none does, or one that we called."""
    if not frame.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
        return None
    outer, each = frame, frame.f_back
    while each is not None and each.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
        if each.f_code.co_name != "wrapper":
            outer = each
        each = each.f_back
    is_ours = each is not None and each.f_code.co_filename.startswith(_HERE)
    return None if is_ours or outer.f_code.co_name == "wrapper" else outer


def _told(channel: Channel) -> ChannelReport:
    recent, marks = tuple(channel.recent), tuple(channel.marks)
    return ChannelReport(channel.ranks, channel.launched, tuple(Call(*call) for call in recent), channel.foreign(), marks)


def _said(wait: Wait, now: float) -> WaitReport:
    key = wait.channel.key if wait.channel else ""
    return WaitReport(Call(*wait.call), key, wait.number, tuple(wait.awaits), now - wait.since, wait.place is not None)


def _place(frame: FrameType | None) -> str:
    """File, line and function of the innermost frame that belongs to neither torch nor this library."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
