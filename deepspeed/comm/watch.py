"""Ranks that wait for each other are told so, by name, instead of hanging.

    call      WATCH.follow / wait: counts the call, blocks in slices of a quarter second     no traffic, a few microseconds
    thread    looks every second or so: is a wait late, or does another rank ask?            one small request to the store
              then ranks compare (`comm.meeting`), and where it is certain that they can never go on, each has a verdict
    slice     a verdict? raise it: call, module, step, who waits where                       on every rank

A rank that is only slow is never an error here, however late: the time-out of the process group decides about it, and
its error then says where the others stand ("is not in a collective, at train.py:80").

Lives here: `WATCH`, the one of this process; `naming`, by which others say what they are doing; `late`, which those who
block without the back end call. Does not live here: the records (`comm.ledger`), the comparison. `comm.world` starts
and stops it, `comm.collectives` follows each call with it.

[Note: what is followed] Waits in gloo's collectives are cut into slices. Messages between two ranks, collectives of
objects and other calls that gloo does not let go of block a helper thread, while the caller waits for that one in
slices. Collectives of devices do not block the host; they are counted, and their own watchdogs (NCCL's) end them.

[Note: new calls] gloo does not survive one call made with different sizes: it ends the process (SIGABRT) whose buffer
is too small, or leaves part of the larger one as it was. So before a call of a gloo group that follows the two before
it for the first time, the ranks agree through the store on what it is; training soon repeats itself, and then nothing
is asked. A rank that leaves the common way comes to a call that is new to it, waits there, and is told with all others.
When some rank does not come for several times the limit, the others start the call without agreement: the back end's
time-out begins then.

[Note: torch's own calls] A collective called as `torch.distributed.all_reduce` is not followed: nothing here is on its
way. But a thread that stands still in one is seen by its frame, and the back end counts all that is done on a group: so it
takes part in the comparison, and is let go of with the others.

[Note: stopped ranks] A rank that a signal has stopped is slow as far as it can be seen from afar. Ranks of its own host see
its state, and raise after some seconds; those of other hosts log who does not answer.

[Note: told failures] A rank whose own work failed in a way that leaves the others waiting says so in the store. The thread
of each rank that waits looks there as often as it looks for late ranks, and where the back end gives a collective up, that
is asked first: a process that ends takes its connections along, and the reason is worth more than "connection closed". The
rank that fails stays until the others have it, for some seconds at most: it may be the one that serves the store.

[Note: after a verdict] gloo's threads are still in the collectives that can never end, and whoever takes the process
group down, the interpreter's end included, waits for them. A receive that times out makes gloo close all connections of
its group, and with them go those collectives. A rank that gave up on a stopped one does the same when its watch ends.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import monotonic, sleep
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from deepspeed.comm.agreement import Agreement
from deepspeed.comm.blocking import lend
from deepspeed.comm.divergence import positions, shortened
from deepspeed.comm.failures import WHERE_TO_LOOK, PeerFailedError
from deepspeed.comm.ledger import Channel, Ledger, Wait
from deepspeed.comm.meeting import Meeting
from deepspeed.comm.neighbours import Neighbours
from deepspeed.comm.patience import ProcessIdentity
from deepspeed.common.logging import get_logger
from deepspeed.errors import CommError

__all__ = ["WATCH", "FollowedWork", "Watch", "late", "naming", "set_step", "worked"]

logger = get_logger(__name__)

_SLICE_SECONDS = 0.25
_SLICE = timedelta(seconds=_SLICE_SECONDS)
_LOOKS_THAT_MAY_FAIL = 3
_NEIGHBOURS_PAUSES_SECONDS = (0.002, 0.004, 0.01, 0.02, 0.05, 0.1, 0.2, 0.2)
_JOIN_SECONDS = 2.0
_ASKED_AT_MOST = 16
_TAG_NOBODY_SENDS = 2**30
_AGREEING_RANKS = 256
_MORE_SECONDS = 3.0
_STOPPED_SECONDS = 4.0
_SILENT_STORE_SECONDS = 5.0
_FAILURE, _HEARD = "failure", "failure heard"


class Watch:
    """The watch of one process; off in a world of one rank.

    Attributes:
        is_on: calls are to be followed; tested once per call.
        ledger: what this rank calls and where it waits.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.ledger = Ledger(0)
        self._neighbours = Neighbours(0)
        self._asking_since: float | None = None
        self._is_silence_told = False
        self._has_given_up = False  # on a stopped rank: without a verdict
        self._failure = ""
        self._hearing = threading.Lock()
        self._meeting: Meeting | None = None
        self._generation = 0
        self._limit_seconds = 0.0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, rank: int, world_size: int, limit_seconds: float) -> None:
        """Watch this process's calls from now on; each rank of the default process group calls it as often.

        Args:
            rank: of this process.
            world_size: ranks that compare.
            limit_seconds: a wait that lasts so long makes ranks compare; 0 leaves the watch off.
        """
        self.stop()
        if world_size == 1 or limit_seconds <= 0:
            return
        self._generation += 1
        self._limit_seconds = limit_seconds
        self.ledger = ledger = Ledger(rank)
        self._neighbours = Neighbours(rank)
        self._is_silence_told = self._has_given_up = False
        self._failure = ""
        self.channel(None)  # what is done on the world from now on is counted, by whomever
        self._introduce()
        self._meeting = Meeting(rank, world_size, limit_seconds, ledger.report, ledger.late_seconds)
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._meeting, self._wake), name="deepspeed watch", daemon=True
        )
        self.is_on = True
        self._thread.start()
        atexit.unregister(self.stop)
        atexit.register(self.stop)

    def know_neighbours(self, processes: Mapping[int, ProcessIdentity]) -> None:
        """Take in the processes of ranks (global) that share this host's memory."""
        self._neighbours.know(processes)

    def stop(self) -> None:
        """Stop watching, and tell ranks that still wait that this one has ended. Not collective."""
        meeting, thread, self._meeting, self._thread = self._meeting, self._thread, None, None
        self.is_on = False
        if meeting is None or thread is None:
            return
        self._wake.set()
        is_held = self._has_given_up and self._asking_since is not None  # by the store of a stopped rank, perhaps for ever
        thread.join(0 if is_held else _JOIN_SECONDS)
        if self._has_given_up:  # [Note: after a verdict]
            for group in self.ledger.blocking_groups():
                _break(group, self.ledger.rank)
        store = self._store()
        if store is not None and not thread.is_alive():
            try:
                meeting.leave(store, self.ledger.farewell())
            except RuntimeError as error:  # the store went with the rank that hosts it
                logger.debug("rank %d could not say that it ends: %s", self.ledger.rank, error)

    def _run(self, meeting: Meeting, wake: threading.Event) -> None:
        """Body of the thread."""
        failures = 0
        self._meet_neighbours(wake)
        while failures < _LOOKS_THAT_MAY_FAIL and not self.verdict and not wake.wait(meeting.pause_seconds):
            store = self._store()  # anew each time: whoever takes the process group down must not find us holding it
            if store is None:
                return
            self._asking_since = monotonic()
            try:
                if meeting.is_open:
                    self._neighbours.learn(store)
                meeting.look(store)
                if self.ledger.late_seconds() > 0:
                    self._hear_failure(store)
                failures = 0
            except RuntimeError as error:
                failures += 1
                logger.debug("rank %d could not look at the others: %s", self.ledger.rank, error)
            finally:
                self._asking_since = None
            late = meeting.late_text()
            if late:
                logger.warning("rank %d: %s", self.ledger.rank, late)
        if self.verdict:
            if not self.ledger.is_waiting_here():  # nobody here is about to raise it
                logger.error("rank %d: %s", self.ledger.rank, self.verdict)
            wake.wait(2 * _SLICE_SECONDS)  # those who wait in slices raise the verdict first
            for group in self.ledger.blocking_groups():
                _break(group, self.ledger.rank)

    def _introduce(self) -> None:
        """Say who this rank is, before it can be stopped; the other ranks do so now, too."""
        store = self._store()
        try:
            if store is not None:
                self._neighbours.introduce(store)
        except RuntimeError as error:
            logger.debug("rank %d could not say which process it is: %s", self.ledger.rank, error)

    def _meet_neighbours(self, wake: threading.Event) -> None:
        """Learn who else is on this host, at once: a rank that is stopped may be the one that serves the store."""
        store = self._store()
        try:
            for pause_seconds in _NEIGHBOURS_PAUSES_SECONDS:
                if store is None:
                    return
                self._neighbours.learn(store)
                if wake.wait(pause_seconds):
                    return
        except RuntimeError as error:
            logger.debug("rank %d does not know who else is on its host: %s", self.ledger.rank, error)

    def _store(self) -> PrefixStore | None:
        """The process group's store, under a prefix of ours; None when the group is gone."""
        try:
            store = _get_default_store()
        except ValueError:
            return None
        return PrefixStore(f"deepspeed watch {self._generation}", store)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def channel(self, group: dist.ProcessGroup | None) -> Channel | None:
        """The channel of a group (None: the world); None when this process is not one of its ranks."""
        group = group if group is not None else dist.group.WORLD
        return self.ledger.channel(group) if isinstance(group, dist.ProcessGroup) else None

    @property
    def verdict(self) -> str:
        """Why ranks can never go on; empty while nobody has found that."""
        return self._failure or ("" if self._meeting is None else self._meeting.verdict)

    def tell_failure(self, text: str) -> str:
        """Say why this rank cannot go on; whoever waits, now or later, raises `PeerFailedError`. [Note: told failures]

        Blocks until all ranks have heard it, some seconds at most. Call it also on a rank that has heard it, before it
        raises, so that the store stays until all have.

        Returns:
            The first text that any rank told: what failed first.
        """
        store, meeting = self._store(), self._meeting
        if store is None or meeting is None:
            return text
        try:
            first = store.compare_set(_FAILURE, "", text).decode()
            self._take_failure(store, first)
            deadline = monotonic() + 2 * meeting.calm_seconds + 1
            while store.add(_HEARD, 0) < meeting.world_size and monotonic() < deadline:
                sleep(0.05)
        except RuntimeError as error:  # the store went with the rank that hosts it
            logger.debug("rank %d could not say that it failed: %s", self.ledger.rank, error)
            return text
        return first

    def _hear_failure(self, store: PrefixStore) -> None:
        if not self._failure and store.check([_FAILURE]):
            self._take_failure(store, store.get(_FAILURE).decode())

    def _take_failure(self, store: PrefixStore, text: str) -> None:
        """Believe it, and count this rank among those that have heard it: once, whichever thread hears it first."""
        with self._hearing:
            if self._failure:
                return
            self._failure = text
        store.add(_HEARD, 1)

    def check(self) -> None:
        """Raise the verdict if there is one, or that a signal has stopped a rank of this host. Called in every wait.

        Raises:
            CommError: ranks wait for each other, did different things, or are stopped.
        """
        verdict = self.verdict
        if verdict:
            raise self._verdict_error()
        if self._meeting is None:
            return
        stopped = self._neighbours.stopped(_STOPPED_SECONDS)
        if stopped:
            self._has_given_up = True
            waits = " and ".join(wait.position() for wait in [self.ledger.report()] if wait.waits)
            raise CommError(f"rank {self.ledger.rank}{' ' if waits else ''}{waits}: {stopped}")
        asking = self._asking_since
        if asking is not None and monotonic() - asking >= _SILENT_STORE_SECONDS and not self._is_silence_told:
            self._is_silence_told = True
            logger.warning(
                "rank %d: the store of the process group has not answered for %.0f s. Rank 0 serves it as a rule: its "
                "process is stopped, or its host cannot be reached. This rank waits on until the time-out.",
                self.ledger.rank,
                monotonic() - asking,
            )

    def _verdict_error(self) -> CommError:
        if self._failure:
            return PeerFailedError(self._failure)
        return CommError(f"rank {self.ledger.rank}: {self.verdict}")

    def launch(self, channel: Channel, operation: str, nbytes: int) -> Wait:
        """Count a call that is about to start. May block until all ranks of the channel are there. [Note: new calls]

        Raises:
            CommError: the verdict.
        """
        record = self.ledger.launch(channel, operation, nbytes)
        if channel.is_blocking and len(channel.ranks) <= _AGREEING_RANKS and channel.is_new():
            channel.asked += 1
            store = self._store()
            if store is not None:
                self._agree(record, channel, store)
        return record

    def _agree(self, record: Wait, channel: Channel, store: PrefixStore) -> None:
        """[Note: new calls]. A helper thread asks: a store whose host is stopped answers nothing, and cannot be left."""
        mine = str(record.call[:2])
        agreement = Agreement(store, f"{channel.key} {channel.asked}", mine, len(channel.ranks))
        began = monotonic()
        self.ledger.begin(record)
        try:
            agreement.start()
            while not agreement.is_over.wait(_SLICE_SECONDS):
                if agreement.first not in ("", mine):
                    record.since = min(record.since, began - self._limit_seconds)  # it is late: why wait to say so
                self.check()
                waited = monotonic() - began
                if waited >= 4 * self._limit_seconds + _MORE_SECONDS or self._neighbours.dead(channel.ranks):
                    break  # the call itself will tell
        finally:
            self.ledger.end()
            agreement.is_cancelled = True
        if agreement.first not in ("", mine):
            text = (
                f"{record.call[0]} of ranks {shortened(channel.ranks)}: here as {mine}, on another rank as {agreement.first}"
            )
            raise self.failed(record.call[0], channel.ranks, CommError(text))

    def wait(self, record: Wait, work: Any, timeout: timedelta | None = None) -> Any:
        """Block until a gloo collective is over; return what its `wait` returns.

        Raises:
            CommError: the verdict.
            RuntimeError: the back end failed, or `timeout` is over.
        """
        deadline = None if timeout is None else monotonic() + timeout.total_seconds()
        self.ledger.begin(record)
        try:
            while True:
                try:
                    return work.wait(_SLICE)
                except RuntimeError:
                    if work.is_completed():
                        return work.wait()  # it was over just now, or it failed: this says which
                self.check()
                if deadline is not None and monotonic() >= deadline:
                    raise RuntimeError(f"Operation timed out after {timeout}")
        finally:
            self.ledger.end()

    def block(self, record: Wait, call: Callable[[], Any]) -> Any:
        """Return `call()`, which blocks in C++ code that cannot be left, run by a helper thread.

        Raises:
            CommError: the verdict; the helper thread then stays behind until the back end gives up.
            BaseException: what `call` raised.
        """
        is_inference = torch.is_inference_mode_enabled()  # it belongs to the thread, and tensors made in it are special

        def body() -> Any:
            with torch.inference_mode(is_inference):
                return call()

        outcome = lend(body)
        self.ledger.begin(record)
        try:
            while True:
                try:
                    ended = outcome.get(timeout=_SLICE_SECONDS)
                    break
                except queue.Empty:
                    self.check()
        finally:
            self.ledger.end()
        return ended.result()

    def together(self, operation: str, ranks: Sequence[int], call: Callable[[], Any]) -> Any:
        """Return `call()`, which the global ranks `ranks` make together, outside any group, and which blocks until all do.

        Raises:
            CommError: the verdict.
        """
        if not self.is_on or dist.get_backend() != "gloo":  # devices are chosen per thread: no helper thread there
            return call()
        self.check()
        return self.block(self.ledger.launch(self.ledger.named(operation, ranks), operation, 0), call)

    def late(self, operation: str, awaits: Sequence[int], waited_seconds: float) -> None:
        """See the function `late`."""
        if self.is_on:
            self.ledger.late(operation, awaits, waited_seconds)
            self.check()

    def failed(self, call: str, ranks: Sequence[int], cause: BaseException) -> CommError:
        """The error for a call that the back end gave up: a dead or late peer, or ranks that did different things.

        Args:
            call: the collective, and what it was for.
            ranks: global ranks of its group.
            cause: what the back end raised.
        """
        known = self.explain(ranks)
        if self.verdict:
            return self._verdict_error()
        return CommError(
            f"{call} failed on rank {dist.get_rank()}, in the group of ranks {shortened(ranks)}: {cause} "
            f"{known}{' ' if known else ''}{WHERE_TO_LOOK}"
        )

    def explain(self, ranks: Sequence[int]) -> str:
        """What is known about a call that the back end gave up: the verdict, or where the others stand; may be empty.

        Blocks only while ranks compare already, until the verdict is there, at most some seconds.

        Args:
            ranks: global ranks of the group; the first sixteen are asked about.
        """
        meeting = self._meeting
        if meeting is None:
            return ""
        others = [rank for rank in ranks[:_ASKED_AT_MOST] if rank != self.ledger.rank]
        known = self._where(meeting, others)  # before they move on
        deadline = monotonic() + 2 * meeting.calm_seconds + 1
        while meeting.is_open and not self.verdict and monotonic() < deadline:
            sleep(0.05)
        return self.verdict or known

    def _where(self, meeting: Meeting, ranks: Sequence[int]) -> str:
        store = self._store()
        if store is None:
            return ""
        try:
            self._hear_failure(store)
            found = meeting.read(store, ranks)
        except RuntimeError:
            return "The store of the process group does not answer: the rank that hosts it, usually rank 0, has ended."
        return f"{positions(found.values())}." if found else ""


def _break(group: dist.ProcessGroup, rank: int) -> None:
    """Close the connections of a gloo group. [Note: after a verdict]"""
    peer = next((each for each in dist.get_process_group_ranks(group) if each != rank), None)
    if peer is None:
        return
    try:
        work = dist.irecv(torch.empty(1), peer, group, _TAG_NOBODY_SENDS)
        if work is not None:
            work.wait(timedelta(milliseconds=1))
    except (RuntimeError, ValueError) as error:  # what it is for; or the group is gone
        logger.debug("connections of ranks %s are closed: %s", dist.get_process_group_ranks(group), error)


class FollowedWork:
    """A started call: its `wait` is watched; all else is the back end's `Work`."""

    def __init__(self, work: Any, record: Wait, *, is_opaque: bool = False) -> None:
        """Store the parts; an opaque wait cannot be cut into slices."""
        self._work = work
        self._record = record
        self._is_opaque = is_opaque

    def wait(self, timeout: timedelta | None = None) -> Any:
        """Block until the call is over.

        Raises:
            CommError: ranks wait for each other, the back end failed, or `timeout` is over.
        """
        try:
            if WATCH.is_on and self._is_opaque:
                return WATCH.block(self._record, self._wait_for(timeout))
            return WATCH.wait(self._record, self._work, timeout) if WATCH.is_on else self._wait_for(timeout)()
        except CommError:
            raise
        except RuntimeError as cause:
            operation, _, name = self._record.call
            assert self._record.channel is not None  # it is a call
            raise WATCH.failed(f"{operation} ({name})" if name else operation, self._record.channel.ranks, cause) from cause

    def _wait_for(self, timeout: timedelta | None) -> Callable[[], Any]:
        return self._work.wait if timeout is None else functools.partial(self._work.wait, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


WATCH = Watch()
"""The watch of this process."""

_NOTHING = nullcontext()


class _Naming:
    __slots__ = ("_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._before = WATCH.ledger.name
        WATCH.ledger.name = self._name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        WATCH.ledger.name = self._before


def naming(name: str) -> AbstractContextManager[None]:
    """While the result is entered, collectives carry this name in error texts: "module 'h.3', gather".

    Costs a fraction of a microsecond, and only the call while the watch is off. Keep the text ready rather than format
    it here.
    """
    return _Naming(name) if WATCH.is_on else _NOTHING


def set_step(step: int) -> None:
    """Say which step of training begins, for error texts."""
    WATCH.ledger.step = step


def worked() -> None:
    """Say that this thread has just done for others, inside a wait that it reports with `late`, what they wait for."""
    WATCH.ledger.worked()


def late(operation: str, awaits: Sequence[int], waited_seconds: float) -> None:
    """Say that this thread blocks, without the back end, until the global ranks `awaits` do their part of `operation`.

    For waits in shared memory: call it every 0.1 s or so as long as the wait goes on, `waited_seconds` being its age. A rank
    that waits in shared memory and one that waits in the back end are then told when they wait for each other.

    Raises:
        CommError: the verdict.
    """
    WATCH.late(operation, awaits, waited_seconds)
