"""Collectives and messages between ranks, in the shapes of `torch.distributed`.

Lives here: every call of a torch.distributed collective in this library. Does not live here: which algorithm is fastest
(`algorithms`), the log (`recorder`), starting the process group (`world`). Everyone calls it through `deepspeed.comm`.

    deepspeed.comm.all_reduce(tensor, group=g)
        |-- one rank:     torch.distributed.all_reduce     two attribute tests more than torch's own call
        |-- several:      counted, and waited for in slices, so that ranks that wait for each other are told (`watch`)
        |-- log on:       the same between two clock readings, device drained; an asynchronous call is timed until its wait()
        |-- meter on:     the same without draining; what blocks the caller is added up too
        `-- a failing back end becomes CommError: collective, rank, ranks of the group, and the back end's text

Shapes and errors are torch's; `group=None` is the world. Every rank of the group must make the same calls in the same
order. Each function that `_watched` wraps also takes, by keyword, what clients of the original pass:

    prof      record this call although `prof_all` is off
    log_name  name to record it under
    debug     the caller's name, appended when the log's `debug` is on
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.failures import NotInitializedError
from deepspeed.comm.follow import FOLLOW, Form, Places
from deepspeed.comm.meter import METER
from deepspeed.comm.recorder import RECORDER, table
from deepspeed.comm.stragglers import compare, waits_table
from deepspeed.comm.watch import WATCH
from deepspeed.common.logging import log_dist
from deepspeed.errors import CommError

P = ParamSpec("P")
R = TypeVar("R")
Group = dist.ProcessGroup | None
ReduceOp = dist.ReduceOp
SUM = dist.ReduceOp.SUM

# Newer torch (2.13) warns about the older of two names for the same call.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TAIL = [
    inspect.Parameter("prof", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool"),
    inspect.Parameter("log_name", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None"),
    inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None"),
]


# -------------------------------------------------------------------- watching a call


def _watched(
    payload: str | None, form: Form = "collective", *, is_part: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Record, follow and explain calls of a collective.

    Args:
        payload: the argument whose bytes count; None: no bytes.
        form: how the watch follows it; see `comm.follow`.
        is_part: the payload is one rank's equal part of the message; the log has the bytes of all.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        places, follow = Places(function, payload), FOLLOW[form]

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast("R", follow(function, places, args, kwargs)) if WATCH.is_on else function(*args, **kwargs)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                if RECORDER.enabled or METER.is_on:
                    return cast("R", _timed(run, function.__name__, places, is_part, args, kwargs))
                if kwargs:
                    _drop_tail(kwargs)
                return run(*args, **kwargs)
            except CommError:
                raise
            except ValueError:
                if not dist.is_initialized():
                    raise NotInitializedError(function.__name__) from None
                raise  # an argument that torch refused: its text says which
            except RuntimeError as cause:
                raise _failed(function.__name__, signature.bind(*args, **kwargs).arguments.get("group"), cause) from cause

        call.__signature__ = signature.replace(  # type: ignore[attr-defined]  # inspect reads it
            parameters=[*signature.parameters.values(), *_TAIL]
        )
        return call

    return wrap


def _drop_tail(kwargs: dict[str, Any]) -> tuple[bool, str | None, str | None]:
    """Take the shared trailing arguments out of `kwargs`."""
    return kwargs.pop("prof", False), kwargs.pop("log_name", None), kwargs.pop("debug", None)


def _failed(name: str, group: Group, cause: Exception) -> CommError:
    doing = f" ({WATCH.ledger.name})" if WATCH.ledger.name else ""
    return WATCH.failed(f"{name}{doing}", dist.get_process_group_ranks(group), cause)


class _TimedWork:
    """A started call that is over when it has been waited for; all else is the back end's `Work`."""

    def __init__(self, work: Any, finish: Callable[[], None] | None) -> None:
        self._work = work
        self._finish = finish

    def wait(self, *args: Any) -> Any:
        began = time.perf_counter()
        result = self._work.wait(*args)
        METER.waited(time.perf_counter() - began)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _timed(
    function: Callable[..., Any],
    operation: str,
    places: Places,
    is_part: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call between two readings of the clock; for the log with the device's queues drained before each."""
    prof, log_name, debug = _drop_tail(kwargs)
    name = log_name or operation
    is_logged = RECORDER.enabled and RECORDER.wants(name, prof)
    if not is_logged and not METER.is_on:
        return function(*args, **kwargs)
    if RECORDER.debug:
        name = f"{name} | [Caller Func: {debug or sys._getframe(2).f_code.co_name}]"
    world_size = dist.get_world_size(places.group(args, kwargs))
    nbytes = places.nbytes(args, kwargs) * (world_size if is_part else 1)
    synchronize = get_accelerator().synchronize if is_logged else _nothing
    synchronize()
    start = time.perf_counter()

    def finish() -> None:
        synchronize()
        seconds = time.perf_counter() - start
        METER.add(operation, nbytes, seconds)
        if is_logged:
            RECORDER.append(operation, name, seconds * 1e3, nbytes, world_size)

    result = function(*args, **kwargs)
    if isinstance(result, list) and result:  # a batch is over when its last part is
        return [*(_TimedWork(work, None) for work in result[:-1]), _TimedWork(result[-1], finish)]
    if hasattr(result, "wait"):
        return _TimedWork(result, finish)
    METER.waited(time.perf_counter() - start)
    finish()
    return result


def _nothing() -> None:
    """Where nothing is waited for."""


# -------------------------------------------------------------------- reductions


@_watched("tensor")
def all_reduce(tensor: torch.Tensor, op: Any = SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce `tensor` over the group, in place on every rank. Returns a `Work` when `async_op`, else None."""
    return dist.all_reduce(tensor, op, group, async_op)


@_watched("tensor")
def inference_all_reduce(tensor: torch.Tensor, op: Any = SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce as `all_reduce` does; the name that inference code calls."""
    return dist.all_reduce(tensor, op, group, async_op)


@_watched("tensors", "opaque")
def all_reduce_coalesced(tensors: list[torch.Tensor], op: Any = SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce several tensors in one call of the back end, each in place."""
    with _coalescing_manager(group, async_ops=async_op) as work:
        for tensor in tensors:
            dist.all_reduce(tensor, op, group)
    return work if async_op else None


@_watched("tensor")
def reduce(tensor: torch.Tensor, dst: int, op: Any = SUM, group: Group = None, async_op: bool = False) -> Any:
    """Reduce `tensor` over the group into global rank `dst`; the other ranks' content is undefined afterwards."""
    return dist.reduce(tensor, dst, op, group, async_op)


@_watched("output", is_part=True)
def reduce_scatter(
    output: torch.Tensor, input_list: list[torch.Tensor], op: Any = SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce the list over the group, element i into the `output` of group rank i."""
    return dist.reduce_scatter(output, input_list, op, group, async_op)


@_watched("output_tensor", is_part=True)
def reduce_scatter_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce `tensor` (group size x the output's numel) over the group, each rank keeping its part."""
    return _reduce_scatter_single(output_tensor, tensor, op, group, async_op)


@_watched("output_tensor", is_part=True)
def reduce_scatter_fn(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Do as `reduce_scatter_tensor`, which every supported torch has; the name that clients of the original call."""
    return _reduce_scatter_single(output_tensor, tensor, op, group, async_op)


# -------------------------------------------------------------------- gathers


@_watched("tensor", is_part=True)
def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Gather every rank's `tensor` into `tensor_list`, in group order, on every rank."""
    return dist.all_gather(tensor_list, tensor, group, async_op)


@_watched("tensor", is_part=True)
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Gather every rank's `tensor` into `output_tensor` (group size x its numel), on every rank."""
    return _all_gather_single(output_tensor, tensor, group, async_op)


@_watched("input_tensors", "opaque", is_part=True)
def all_gather_coalesced(
    output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], group: Group = None, async_op: bool = False
) -> Any:
    """Gather several tensors in one call of the back end, pair by pair as `all_gather_into_tensor`."""
    with _coalescing_manager(group, async_ops=async_op) as work:
        for output, tensor in zip(output_tensors, input_tensors, strict=True):
            _all_gather_single(output, tensor, group)
    return work if async_op else None


@_watched("input_tensor", is_part=True)
def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Do as `all_gather_into_tensor`, which every supported torch has; the name that clients of the original call."""
    return _all_gather_single(output_tensor, input_tensor, group, async_op)


@_watched("tensor", is_part=True)
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Gather every rank's `tensor` into `gather_list` of global rank `dst`; the others pass None."""
    return dist.gather(tensor, gather_list, dst, group, async_op)


@_watched("tensor", is_part=True)
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Give element i of `scatter_list` of global rank `src` to group rank i; the others pass None."""
    return dist.scatter(tensor, scatter_list, src, group, async_op)


# -------------------------------------------------------------------- all-to-all and broadcast


@_watched("tensor", "uneven")
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send part i of `tensor` (along dimension 0) to group rank i and receive in order; parts are equal without sizes."""
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)


@_watched("input_tensor_list", "uneven")
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send element i of the input list to group rank i and receive in order."""
    return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)


@_watched("tensor")
def broadcast(tensor: torch.Tensor, src: int, group: Group = None, async_op: bool = False) -> Any:
    """Copy `tensor` of global rank `src` to every rank of the group."""
    return dist.broadcast(tensor, src, group, async_op)


# -------------------------------------------------------------------- ranges of flat buffers


class _AllOf:
    """Several started collectives as one `Work`."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *timeout: timedelta) -> None:
        for work in self._works:
            work.wait(*timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _in_effect(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a call the name of the collective that it amounts to, in the log and in errors.

    Whatever carries it, the log shows one call per range with the bytes of the whole range.
    """

    def rename(function: Callable[P, R]) -> Callable[P, R]:
        function.__name__ = name
        return function

    return rename


@_watched("tensor")
@_in_effect("reduce_scatter_tensor")
def reduce_scatter_range(
    part: torch.Tensor, tensor: torch.Tensor, op: Any = SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Reduce `tensor` over the group, the i-th equal part into the `part` of group rank i; it may be its own place."""
    return _reduce_scatter_single(part, tensor, op, group, async_op)


@_watched("tensor")
@_in_effect("reduce_scatter_tensor")
def exchange_range(received: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Bring to each rank what a reduce-scatter adds up there, by one scatter per rank; the caller adds.

    Element i of `received` becomes group rank i's copy of this rank's part of `tensor`; this rank's own element is that part
    of its `tensor` itself. All are contiguous, of any one dtype: bytes travel.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    me = dist.get_rank()
    parts = list(tensor.view(torch.uint8).chunk(len(ranks)))
    works = [
        dist.scatter(mine.view(torch.uint8), parts if rank == me else None, rank, group, async_op)
        for rank, mine in zip(ranks, received, strict=True)
    ]
    return _AllOf(works) if async_op else None


@_watched("tensor")
@_in_effect("all_gather_into_tensor")
def gather_range(tensor: torch.Tensor, part: torch.Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Gather every rank's `part` into `tensor`, in rank order; it may be its own place there."""
    return _all_gather_single(tensor, part, group, async_op)


@_watched("tensor")
@_in_effect("all_gather_into_tensor")
def broadcast_range(tensor: torch.Tensor, group: Group = None, async_op: bool = False) -> Any:
    """Complete `tensor`, of which group rank i has the i-th equal part, by one broadcast per rank; bytes travel."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    parts = tensor.view(torch.uint8).chunk(len(ranks))
    works = [dist.broadcast(part, rank, group, async_op) for part, rank in zip(parts, ranks, strict=True)]
    return _AllOf(works) if async_op else None


# -------------------------------------------------------------------- messages between two ranks


@_watched("tensor", "message")
def send(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Send to global rank `dst`; blocks until the tensor may be reused."""
    dist.send(tensor, dst, group, tag)


@_watched("tensor", "message")
def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Receive from global rank `src`, or from anybody; blocks. Returns the sender's global rank."""
    return dist.recv(tensor, src, group, tag)


@_watched("tensor", "message")
def isend(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> Any:
    """Start sending to global rank `dst`; returns a `Work`."""
    return dist.isend(tensor, dst, group, tag)


@_watched("tensor", "message")
def irecv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Any:
    """Start receiving from global rank `src`, or from anybody; returns a `Work`."""
    return dist.irecv(tensor, src, group, tag)


class P2POp(dist.P2POp):
    """One send or receive of a batch: `op` is `isend` or `irecv`, of this module or of torch, `peer` a global rank."""

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> P2POp:
        """Torch's, for one of torch's own functions."""
        return cast("P2POp", super().__new__(cls, _PLAIN.get(op, op), *args, **kwargs))

    def __init__(self, op: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(_PLAIN.get(op, op), *args, **kwargs)


_PLAIN = {isend: dist.isend, irecv: dist.irecv}  # torch compares with its own functions


@_watched("p2p_op_list", "batch")
def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
    """Start several sends and receives (`P2POp`) together; returns their `Work` objects."""
    works: list[Any] = dist.batch_isend_irecv(p2p_op_list)
    return works


# -------------------------------------------------------------------- objects and meetings


@_watched(None, "opaque")
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Gather every rank's picklable `obj` into `object_list` (of the group's size), on every rank."""
    dist.all_gather_object(object_list, obj, group)


@_watched(None, "opaque")
def broadcast_object_list(object_list: list[Any], src: int, group: Group = None, device: torch.device | None = None) -> None:
    """Copy the picklable objects of global rank `src` into every rank's `object_list` of the same length."""
    dist.broadcast_object_list(object_list, src, group, device)


@_watched(None)
def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Block until every rank of the group has come here."""
    return dist.barrier(group, async_op, device_ids)


@_watched(None, "opaque")
def monitored_barrier(group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """Block as `barrier` does; on a time-out rank 0 raises an error that names the missing ranks (gloo only)."""
    dist.monitored_barrier(group, timeout, wait_all_ranks)


# -------------------------------------------------------------------- the log


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log the communications so far as a table on rank 0, or return them.

    Args:
        show_straggler: also compare with the fastest rank, call by call, and log who waited for whom; then every rank must
            call this, after the same calls, for it communicates itself.
        return_dict: return `CommsLogger.summary` and log nothing.
    """
    comparison = None
    if show_straggler:
        world_size = dist.get_world_size()
        partial = {key for key, sizes in RECORDER.world_sizes.items() if sizes != {world_size}}
        comparison = compare(RECORDER.comms_dict, partial, _Speech(dist.get_rank(), world_size))
    summary = RECORDER.summary(None if comparison is None else comparison.least_ms)
    if return_dict:
        return summary
    log_dist("communications so far, of this rank\n" + table(summary))
    if comparison is not None:
        log_dist(waits_table(comparison))
    return None


class _Speech:
    """How ranks speak while they compare their logs: by calls that the log does not see."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def least(self, values: Sequence[float]) -> list[float]:
        accelerator = get_accelerator()
        dtype = torch.float64 if accelerator.is_fp64_supported() else torch.float32
        least = torch.tensor(values, dtype=dtype, device=accelerator.current_device_name())
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return [float(value) for value in least.tolist()]

    def gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered
