"""Which algorithm serves a back end best: for the mean of a flat gradient buffer over ranks.

    group of one rank                     nothing to do                    LocalReducer
    CPU ranks that share a host           memory that all map              comm.shared_memory.SharedMemoryReducer
    all others (devices, several hosts)   the back end's own all-reduce    BackendReducer

Lives here: the choice and the two simple algorithms. Does not live here: the arithmetic (`comm.mean`). Called by
`engine.build`.
The table rests on benchmarks/comm_algorithms.py; see docs/adr/0006-shared-memory-collectives.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from deepspeed.comm import collectives
from deepspeed.comm.failures import WHERE_TO_LOOK
from deepspeed.comm.mean import MeanRule, check_range, divide_
from deepspeed.comm.patience import Patience
from deepspeed.comm.recorder import RECORDER
from deepspeed.comm.shared_memory import SharedMemoryReducer, share_memory
from deepspeed.common.logging import log_dist_once
from deepspeed.errors import ArgumentError, CommError

__all__ = ["BackendReducer", "FlatAllReducer", "LocalReducer", "Work", "flat_all_reducer"]


class Work(Protocol):
    """Something that goes on while the caller does other things."""

    def wait(self) -> None:
        """Block the caller (on a device: its current stream) until the result is there."""


class FlatAllReducer(Protocol):
    """A flat buffer whose ranges become the mean over the ranks of a group."""

    @property
    def buffer(self) -> torch.Tensor:
        """1-D, zeroed at first; views of it serve as gradients."""

    def launch(self, start: int, stop: int) -> Work:
        """Start the in-place mean of `buffer[start:stop]`.

        Every rank of the group launches the same ranges in the same order, and touches a range in flight not before its
        `wait()` has returned. Between a launch and its wait no rank may block on what another does only after its own wait.
        """

    def close(self) -> None:
        """Let go of what is shared with other ranks. Not collective."""


def flat_all_reducer(
    numel: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float | None = None,
    *,
    communication_dtype: torch.dtype | None = None,
    prescale: bool = False,
    predivide_factor: float = 1.0,
    may_share_memory: bool = True,
) -> FlatAllReducer:
    """Build the fastest reducer for a flat gradient buffer. Collective over `group`; all ranks give the same arguments.

    Args:
        numel: elements of the buffer; the same on all ranks.
        dtype: of the buffer.
        device: where it lies.
        group: whose ranks the mean is taken over; None means all ranks, or this process alone without a process group.
        timeout_seconds: how long a wait may take; None means the limit of the process group.
        communication_dtype: contributions are rounded to it and reduced in it; None means `dtype`.
        prescale: divide by the number of ranks before the sum instead of after.
        predivide_factor: f > 0: divide by f before the sum and by world/f after; without effect when `prescale`.
        may_share_memory: False keeps to the back end; one rank that says so decides for all.

    Raises:
        ArgumentError: a size or factor that cannot be.
        CommError: ranks ask for different buffers (noticed where they share a host).
    """
    if numel < 0 or predivide_factor <= 0:
        raise ArgumentError(
            f"flat_all_reducer got numel={numel}, predivide_factor={predivide_factor}; needed numel >= 0 and a factor > 0."
        )
    device = torch.device(device)
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    if world_size == 1 or numel == 0:
        return LocalReducer(numel, dtype, device)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rule = MeanRule(world_size, prescale, predivide_factor)
    communication_dtype = communication_dtype or dtype
    if device.type == "cpu":
        rank = dist.get_rank(group)
        shared = share_memory(numel, dtype, rank, world_size, lambda values: _gather(values, group), may_share_memory)
        if not isinstance(shared, str):
            patience = Patience(_timeout_seconds(group) if timeout_seconds is None else timeout_seconds)
            return SharedMemoryReducer(shared, rank, ranks, rule, communication_dtype, patience, _record)
        log_dist_once(
            f"Gradients of ranks {ranks} are reduced by the back end, not through shared memory: {shared}.",
            ranks=ranks[:1],
            level=logging.DEBUG if not may_share_memory else logging.INFO,
        )
    return BackendReducer(
        numel, dtype, device, group, ranks, rule, communication_dtype, timeout_seconds if device.type == "cpu" else None
    )


def _gather(values: list[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """All-gather of a list of integers, the same length on all ranks of `group`."""
    mine = torch.tensor(values, dtype=torch.int64)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    collectives.all_gather(all_ranks, mine, group)
    return [each.tolist() for each in all_ranks]


def _record(nbytes: int, world_size: int) -> Callable[[], None] | None:
    """Begin to time a mean that no collective carries, for the comms log; call the result when it is there."""
    if not RECORDER.enabled or not RECORDER.wants("all_reduce", prof=False):
        return None
    began = time.perf_counter()
    return lambda: RECORDER.append("all_reduce", "all_reduce", (time.perf_counter() - began) * 1e3, nbytes, world_size)


def _timeout_seconds(group: dist.ProcessGroup | None) -> float:
    """The limit that the group was made with; torch has no public way to ask, so its default stands in where it hides it."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # torch.distributed is initialized
    backend = group._get_backend(torch.device("cpu"))
    limit = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    assert isinstance(limit, timedelta)  # both sources are
    return limit.total_seconds()


class LocalReducer:
    """The reducer of a single rank: the mean is there already."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffer."""
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, start: int, stop: int) -> Work:
        """See `FlatAllReducer`."""
        check_range(start, stop, self.buffer.numel())
        return _DONE

    def close(self) -> None:
        """See `FlatAllReducer`."""


class BackendReducer:
    """The reducer that asks the back end: one asynchronous all-reduce per range, in place."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        rule: MeanRule,
        communication_dtype: torch.dtype,
        timeout_seconds: float | None = None,
    ) -> None:
        """Allocate the buffer; parameters as in `flat_all_reducer`, `ranks` being the global rank of each group rank."""
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)
        self._group = group
        self._ranks = ranks
        self._dtype = communication_dtype
        self._timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        is_plain = (
            rule.before == 1.0 and dist.get_backend(group) == "nccl"
        )  # only nccl takes the mean by itself, in one kernel
        self._op = dist.ReduceOp.AVG if is_plain else dist.ReduceOp.SUM
        self._before, self._after = (1.0, 1.0) if is_plain else (rule.before, rule.after)

    def launch(self, start: int, stop: int) -> Work:
        """See `FlatAllReducer`.

        Raises:
            ArgumentError: the range is not inside the buffer.
            CommError: the back end refuses.
        """
        check_range(start, stop, self.buffer.numel())
        if start == stop:
            return _DONE
        target = self.buffer[start:stop]
        sent = target.to(self._dtype)  # the target itself where the dtype is the same
        divide_(sent, self._before)
        where = f"gradient elements [{start}, {stop}) of {self.buffer.numel()} over ranks {list(self._ranks)}"
        handle = collectives.all_reduce(sent, self._op, self._group, async_op=True)
        return _BackendWork(handle, self._timeout, target, sent, self._after, where)

    def close(self) -> None:
        """See `FlatAllReducer`."""


class _BackendWork:
    """One range on its way through the back end."""

    def __init__(
        self,
        handle: dist.Work,
        timeout: timedelta | None,
        target: torch.Tensor,
        sent: torch.Tensor,
        after: float,
        where: str,
    ) -> None:
        self._handle: dist.Work | None = handle
        self._timeout = timeout
        self._target = target
        self._sent = sent
        self._after = after
        self._where = where

    def wait(self) -> None:
        """Block until the range holds the mean; raise CommError when the back end fails."""
        if self._handle is None:
            return
        try:
            self._handle.wait() if self._timeout is None else self._handle.wait(self._timeout)
        except RuntimeError as error:
            raise CommError(f"the mean of {self._where} failed in the back end: {error} {WHERE_TO_LOOK}") from error
        self._handle = None
        divide_(self._sent, self._after)
        if self._sent is not self._target:
            self._target.copy_(self._sent)


class _Done:
    """A work that is over before it began."""

    def wait(self) -> None:
        """Return."""


_DONE = _Done()
