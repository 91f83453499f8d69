"""How each kind of call is counted and waited for while the watch is on.

    collective  started asynchronously, then waited for in slices, or handed out as a `FollowedWork`
    uneven      the same; its ranks may pass different sizes
    opaque      cannot be left once it blocks: run by a helper thread
    message     a send or receive, between two ranks: the same
    batch       several sends and receives, started together

Lives here: what `comm.collectives` does around torch's function, by the form of the call. Does not live here: the waits
themselves (`comm.watch`), the counts (`comm.ledger`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from deepspeed.comm.divergence import ANY_NBYTES
from deepspeed.comm.watch import WATCH, FollowedWork

__all__ = ["FOLLOW", "Form", "Places", "nbytes_of"]

Form = Literal["collective", "uneven", "opaque", "message", "batch"]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Places:
    """Where a function takes its group, payload and peer from, worked out once: binding a signature per call costs more."""

    def __init__(self, function: Callable[..., Any], payload: str | None) -> None:
        """Look at the parameters of `function`; `payload` names the one whose bytes count, None: no bytes."""
        self.name = function.__name__
        self._parameters = list(inspect.signature(function).parameters)
        self._payload = payload
        self._group_at = self._at("group")
        self._payload_at = self._at(payload)
        self._async_at = self._at("async_op")

    def _at(self, name: str | None) -> int:
        return self._parameters.index(name) if name in self._parameters else len(self._parameters)

    def group(self, args: Args, kwargs: Kwargs) -> Any:
        """The group, None for the world."""
        return args[self._group_at] if len(args) > self._group_at else kwargs.get("group")

    def nbytes(self, args: Args, kwargs: Kwargs) -> int:
        """Bytes of the payload."""
        if self._payload is None:
            return 0
        return nbytes_of(args[self._payload_at] if len(args) > self._payload_at else kwargs.get(self._payload))

    def is_async(self, args: Args, kwargs: Kwargs) -> bool:
        """Whether the caller asked for a `Work`."""
        return bool(args[self._async_at] if len(args) > self._async_at else kwargs.get("async_op"))

    def as_async(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The same arguments, asking for a `Work`."""
        if len(args) > self._async_at:
            return (*args[: self._async_at], True, *args[self._async_at + 1 :]), kwargs
        return args, {**kwargs, "async_op": True}

    def argument(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """An argument by name, None where it was left out."""
        at = self._parameters.index(name)
        return args[at] if len(args) > at else kwargs.get(name)


def nbytes_of(payload: Any) -> int:
    """Bytes of a tensor, of the tensor of a `P2POp`, or of a list of these together."""
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    if isinstance(payload, dist.P2POp):
        return payload.tensor.nbytes
    return sum(map(nbytes_of, payload)) if isinstance(payload, list | tuple) else 0


def _collective(function: Callable[..., Any], places: Places, args: Args, kwargs: Kwargs) -> Any:
    return _started(function, places, args, kwargs, places.nbytes(args, kwargs))


def _uneven(function: Callable[..., Any], places: Places, args: Args, kwargs: Kwargs) -> Any:
    return _started(function, places, args, kwargs, ANY_NBYTES)


def _started(function: Callable[..., Any], places: Places, args: Args, kwargs: Kwargs, nbytes: int) -> Any:
    channel = WATCH.channel(places.group(args, kwargs))
    if channel is None:
        return function(*args, **kwargs)
    WATCH.check()
    is_waited = channel.is_blocking and not places.is_async(args, kwargs)
    if is_waited:
        args, kwargs = places.as_async(args, kwargs)
    record = WATCH.launch(channel, places.name, nbytes)
    channel.enter()
    try:
        work = function(*args, **kwargs)
    except Exception:  # refused: nothing is on its way
        WATCH.ledger.withdraw(record)
        raise
    finally:
        channel.leave()
    if work is None or not channel.is_blocking:
        return work
    if not is_waited:
        return FollowedWork(work, record)
    WATCH.wait(record, work)
    return None


def _opaque(function: Callable[..., Any], places: Places, args: Args, kwargs: Kwargs) -> Any:
    channel = WATCH.channel(places.group(args, kwargs))
    if channel is None:
        return function(*args, **kwargs)
    WATCH.check()
    record = WATCH.launch(channel, places.name, places.nbytes(args, kwargs))
    channel.enter()
    try:
        if not channel.is_blocking:
            return function(*args, **kwargs)
        result = WATCH.block(record, lambda: function(*args, **kwargs))
    except (TypeError, ValueError):  # torch refused the arguments
        WATCH.ledger.withdraw(record)
        raise
    finally:
        channel.leave()
    return FollowedWork(result, record, is_opaque=True) if hasattr(result, "wait") else result


def _message(function: Callable[..., Any], places: Places, args: Args, kwargs: Kwargs) -> Any:
    is_sent = places.name in ("send", "isend")
    peer = places.argument("dst" if is_sent else "src", args, kwargs)
    group = places.group(args, kwargs) or dist.group.WORLD
    if peer is None or not isinstance(group, dist.ProcessGroup):  # from anybody: who is awaited is not known
        return function(*args, **kwargs)
    WATCH.check()
    source, destination = (WATCH.ledger.rank, peer) if is_sent else (peer, WATCH.ledger.rank)
    channel = WATCH.ledger.messages(group, source, destination)
    record = WATCH.ledger.launch(channel, places.name, places.nbytes(args, kwargs), is_message=True)
    of_group = WATCH.ledger.channel(group)
    of_group.enter()
    try:
        if not channel.is_blocking:
            return function(*args, **kwargs)
        if places.name in ("isend", "irecv"):
            return FollowedWork(function(*args, **kwargs), record, is_opaque=True)
        return WATCH.block(record, lambda: function(*args, **kwargs))
    except (TypeError, ValueError):
        WATCH.ledger.withdraw(record)
        raise
    finally:
        of_group.leave()


def _batch(function: Callable[..., Any], places: Places, args: Args, kwargs: Kwargs) -> Any:
    WATCH.check()
    ledger = WATCH.ledger
    ops = places.argument("p2p_op_list", args, kwargs)
    groups = {op.group or dist.group.WORLD for op in ops}
    used = [ledger.channel(group) for group in groups if isinstance(group, dist.ProcessGroup)]
    for each in used:
        each.enter()
    try:
        works = function(*args, **kwargs)
    finally:
        for each in used:
            each.leave()
    records = []
    for op in ops:
        ends = (ledger.rank, op.peer) if op.op is dist.isend else (op.peer, ledger.rank)
        group = op.group or dist.group.WORLD
        assert group is not None  # torch.distributed is initialized: the batch has been started
        channel = ledger.messages(group, *ends)
        records.append(ledger.launch(channel, op.op.__name__, op.tensor.nbytes, is_message=True))
        if not channel.is_blocking:
            return works
    if len(works) != len(records):
        return works
    return [FollowedWork(work, record, is_opaque=True) for work, record in zip(works, records, strict=True)]


FOLLOW: dict[Form, Callable[[Callable[..., Any], Places, Args, Kwargs], Any]] = {
    "collective": _collective,
    "uneven": _uneven,
    "opaque": _opaque,
    "message": _message,
    "batch": _batch,
}
"""By form."""
