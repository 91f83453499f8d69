"""How the ranks of a job find each other: rank 0's store, who has come to it, and who has not.

    rank 0       listens on MASTER_ADDR:MASTER_PORT and serves the store
    every rank   connects, again and again while nobody listens --> says who it is --> waits until all have
                   |-- after a few seconds, then less and less often: who is missing, who came, what is in the way
                   '-- the port is taken, two processes have one rank, WORLD_SIZE differs, one died: an error at once

Lives here: the store and the meeting at it. Does not live here: where the place is said (`comm.discovery`), the process
group made afterwards (`comm.world`, which calls this), and what ranks do later (`comm.watch`).

[Note: late is no error] A container may still be pulled, a name may not resolve yet: whoever is missing is waited for until
the time-out. What can never come right ends at once.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from deepspeed.comm.divergence import shortened
from deepspeed.comm.patience import ProcessIdentity, known_host_identity
from deepspeed.common.addresses import connected_socket, listening_socket
from deepspeed.common.wording import some
from deepspeed.errors import CommError

__all__ = ["Arrival", "Notices", "StoreGoneError", "connect", "join", "meet", "serve"]

FIRST_NOTICE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_ASKED_PER_SECOND = 1000  # of all ranks together
_CONNECT_SECONDS = 5.0
_SHOWN = 16

Say = Callable[[str], None]


class StoreGoneError(CommError):
    """The process that served the store has ended while ranks were waited for."""


@dataclass(frozen=True)
class Arrival:
    """Who has come: a process, and the place it was given."""

    rank: int
    world_size: int
    host: str
    pid: int
    machine: str
    """Equal for processes that see each other's ids: boot and process-id namespace."""
    start_ticks: int = 0

    @classmethod
    def here(cls, rank: int, world_size: int) -> Arrival:
        """This process."""
        identity = ProcessIdentity.of(os.getpid())
        ticks = identity.start_ticks if identity is not None else 0
        return cls(rank, world_size, socket.gethostname(), os.getpid(), known_host_identity(), ticks)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Arrival:
        """From what `to_text` gave."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def has_died(self) -> bool:
        """Whether it is known to be gone: only of this machine's processes."""
        is_visible = bool(self.machine) and self.machine == known_host_identity() and self.start_ticks > 0
        return is_visible and not ProcessIdentity(self.pid, self.start_ticks).is_alive()


class Notices:
    """When to speak while something takes long: after some seconds, then at twice the age and so on; when to give up."""

    def __init__(self, timeout: timedelta, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now."""
        self._say = say
        self._clock = clock
        self._began = clock()
        self._limit_seconds = timeout.total_seconds()
        self._next_seconds = FIRST_NOTICE_SECONDS

    @property
    def waited_seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._began

    @property
    def is_over(self) -> bool:
        """Whether the time-out is reached."""
        return self.waited_seconds >= self._limit_seconds

    @property
    def is_due(self) -> bool:
        """Whether it is time to speak, or to give up."""
        return self.is_over or self.waited_seconds >= self._next_seconds

    def tell(self, text: str) -> None:
        """Say what is in the way, or, at the time-out, raise it.

        Raises:
            CommError: the time is over.
        """
        if self.is_over:
            raise CommError(f"{text} Gave up after {self._limit_seconds:g} s (DEEPSPEED_TIMEOUT, in minutes, is the limit).")
        self._say(f"{text} Waited {self.waited_seconds:.0f} s so far, and wait on, {self._limit_seconds:g} s in all.")
        self._next_seconds = max(2 * self._next_seconds, self.waited_seconds)


# -- the store --------------------------------------------------------------------------------------------------------


def join(
    address: str,
    port: int,
    me: Arrival,
    timeout: timedelta,
    notices: Notices,
    *,
    serves: bool,
    label: str,
    is_again: bool,
    is_speaker: bool,
) -> Store:
    """Meet all ranks at `address:port`, and return the store they met at.

    Args:
        address: of rank 0, as every rank knows it.
        port: there.
        me: this process and its place.
        timeout: of the store's requests.
        notices: when to say what is in the way, and when to give up.
        serves: this rank is the one that listens; False for all where a launcher's agent does.
        label: of this meeting, the same on all ranks, another one whenever the same ranks meet again.
        is_again: they met before, so that the store may be the one of then, and just about to go.
        is_speaker: as for `meet`.

    Raises:
        CommError: the ranks did not meet.
    """
    may_be_earlier = is_again and not serves
    while True:
        store = PrefixStore(label, (serve if serves else connect)(address, port, me, timeout, notices))
        store.set_timeout(timeout)
        try:
            meet(store, me, notices, is_speaker=is_speaker)
        except StoreGoneError:
            if not may_be_earlier:
                raise
            may_be_earlier = False
            continue
        return store


def serve(address: str, port: int, me: Arrival, timeout: timedelta, notices: Notices) -> TCPStore:
    """Rank 0's store, listening. Blocks while `address` cannot be resolved.

    Raises:
        CommError: the port is taken or not allowed, or the name did not resolve until the time-out.
    """
    place = f"{address}:{port}"
    for pause in _pauses():
        try:
            server = listening_socket(address, port)
            break
        except socket.gaierror as error:
            if notices.is_due:
                notices.tell(_unresolved(place, error))
        except OSError as error:
            raise CommError(_cannot_listen(place, error)) from error
        time.sleep(pause)
    return TCPStore(address, port, me.world_size, True, timeout, wait_for_workers=False, master_listen_fd=server.detach())


def connect(address: str, port: int, me: Arrival, timeout: timedelta, notices: Notices) -> TCPStore:
    """The store of rank 0, as another rank reaches it. Blocks until it is there.

    Raises:
        CommError: it was not there until the time-out.
    """
    place = f"{address}:{port}"
    for pause in _pauses():
        try:
            connected_socket(address, port, _CONNECT_SECONDS).close()
            break
        except socket.gaierror as error:
            text = _unresolved(place, error)
        except OSError as error:
            text = _unreachable(place, error)
        if notices.is_due:
            notices.tell(f"rank {me.rank} on {me.host}: {text}")
        time.sleep(pause)
    found: list[TCPStore | Exception] = []
    is_over = threading.Event()

    def body() -> None:  # it blocks in C++ when a stranger listens there, who answers nothing
        try:
            found.append(TCPStore(address, port, me.world_size, False, timeout, wait_for_workers=False))
        except Exception as error:
            found.append(error)
        is_over.set()

    threading.Thread(target=body, name="deepspeed rendezvous", daemon=True).start()
    while not is_over.wait(_LOOK_SECONDS):
        if notices.is_due:
            notices.tell(
                f"rank {me.rank} on {me.host}: something listens at {place}, but does not answer as the store of "
                "rank 0: another service has that port. Choose another one (MASTER_PORT, --master_port)."
            )
    if isinstance(found[0], Exception):
        raise CommError(f"the store of rank 0 at {place} did not answer: {found[0]}") from found[0]
    return found[0]


def _pauses(longest_seconds: float = 1.0) -> Iterator[float]:
    pause = 0.01
    while True:
        yield pause
        pause = min(1.5 * pause, longest_seconds)


def _unresolved(place: str, error: OSError) -> str:
    return (
        f"the host name in {place} cannot be resolved ({error.strerror}). MASTER_ADDR must be a name or address of rank 0's "
        "host that every host knows."
    )


def _unreachable(place: str, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        why = "nobody listens there: rank 0 has not started, has ended, or runs on another host"
    elif isinstance(error, TimeoutError):
        why = "no answer: the host is down, or a firewall drops the packets"
    else:
        why = str(error.strerror or error)
    return f"rank 0's store at {place} cannot be reached: {why}. Look at rank 0's output, MASTER_ADDR and MASTER_PORT."


def _cannot_listen(place: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        why = "another process has that port (another job of yours?)"
    else:
        why = str(error.strerror or error)
    return f"rank 0 cannot listen on {place}: {why}. Choose another port with MASTER_PORT (--master_port), for all ranks."


# -- the meeting ------------------------------------------------------------------------------------------------------


def meet(store: Store, me: Arrival, notices: Notices, *, is_speaker: bool = True) -> None:
    """Say that this rank has come, and wait until all have. Every rank calls it once, on the same store.

    Args:
        store: that all ranks reach.
        me: this process and its place.
        notices: when to say who is missing, and when to give up.
        is_speaker: whether this rank says who is missing; its error names them in any case.

    Raises:
        CommError: the place is another process's, WORLD_SIZE differs, a process that came has died, or the time is over.
    """
    try:
        _take_place(store, me)
        if store.add("number that came", 1) == me.world_size:
            store.set("all came", "")
        for pause in _pauses(max(0.25, me.world_size / _ASKED_PER_SECOND)):
            if store.check(["all came"]):
                return
            if notices.is_due:
                text = _missing(store, me)
                if notices.is_over or (text and is_speaker):
                    notices.tell(text or f"rank {me.rank} on {me.host}: all came, but the last of them did not say so.")
            time.sleep(pause)
    except CommError:
        raise
    except RuntimeError as error:
        raise StoreGoneError(
            f"rank {me.rank} on {me.host}: the store has gone while ranks were waited for: the process that serves it, "
            "rank 0 as a rule, has ended. Look at its output."
        ) from error


def _take_place(store: Store, me: Arrival) -> None:
    world_size = int(store.compare_set("world size", "", str(me.world_size)))
    if world_size != me.world_size:
        _turn_away(store, me)
        raise CommError(
            f"rank {me.rank} ({me}) was started with WORLD_SIZE={me.world_size}, but the job at this MASTER_ADDR and "
            f"MASTER_PORT has {world_size} ranks. All ranks need the same WORLD_SIZE; two jobs need different ports."
        )
    holder = Arrival.from_text(store.compare_set(f"came/{me.rank}", "", me.to_text()).decode())
    if holder != me:
        _turn_away(store, me)
        raise CommError(
            f"two processes were started as rank {me.rank}: {holder}, and this one, {me}. Each rank must be started once, "
            "with a RANK (or --node_rank) of its own; two jobs need different MASTER_PORTs."
        )


def _turn_away(store: Store, me: Arrival) -> None:
    store.set(f"turned away/{store.add('number turned away', 1)}", me.to_text())


def _missing(store: Store, me: Arrival) -> str:
    """Who has not come and what is known about it; empty when all came just now.

    Raises:
        CommError: as many were turned away as are missing, or one that came has died.
    """
    missing = [rank for rank in range(me.world_size) if not store.check([f"came/{rank}"])]
    if not missing:
        return ""
    came = [rank for rank in range(me.world_size) if rank not in set(missing)]
    shown = [_arrival(store, f"came/{rank}") for rank in came[:_SHOWN]]
    strangers = [_arrival(store, f"turned away/{n + 1}") for n in range(store.add("number turned away", 0))]
    dead = [each for each in shown if each.has_died()]
    places = some([f"rank {each.rank} ({each})" for each in shown], _SHOWN, count=len(came))
    text = (
        f"rank {me.rank} on {me.host} waits for {_numbered(missing)} of {me.world_size}, which did not come yet; there are "
        f"{places}."
    )
    if dead:
        gone = ", ".join(f"rank {each.rank} ({each})" for each in dead)
        raise CommError(f"{text} {gone} came and has died since: its output has the cause.")
    if strangers:
        turned = some([f"rank {each.rank} of {each.world_size} ({each})" for each in strangers], _SHOWN)
        text += f" Turned away, for its place was taken or its WORLD_SIZE another: {turned}."
        if len(strangers) >= len(missing):
            raise CommError(f"{text} Start every rank once, with the same WORLD_SIZE; give each job a port of its own.")
    return f"{text} Look at their output: they have not started, have failed, or cannot reach this address."


def _arrival(store: Store, key: str) -> Arrival:
    return Arrival.from_text(store.get(key).decode())


def _numbered(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {shortened(ranks)}"
