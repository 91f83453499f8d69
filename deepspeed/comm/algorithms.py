"""Which algorithm serves a group of ranks best, for flat buffers that are reduced or gathered.

    | group                                | all-reduce            | reduce-scatter                | all-gather             |
    |--------------------------------------|-----------------------|-------------------------------|------------------------|
    | one rank: nothing to do              | `LocalReducer`        | `LocalReduceScatterer`        | `LocalGatherer`        |
    | CPU ranks of one host: shared memory | `SharedMemoryReducer` | `SharedMemoryReduceScatterer` | `SharedMemoryGatherer` |
    | all others: the back end             | `BackendReducer`      | `BackendReduceScatterer`      | `BackendGatherer`      |

Shards that are read from files first come together through a stage: `LocalSlots`, `SharedSlots`, `BackendSlots`. Parts of
tensors go to all ranks by `LocalParts`, `SharedParts`, `BackendParts`.

Lives here: the choice, and what it hands in: time limits, the log, the collective that shared memory is agreed with. Does
not live here: the protocols and the first row (`comm.flat`), the second (`comm.shared_reducer`, `comm.shared_shards`), the
third (`comm.backend`), stages (`comm.staged`), the arithmetic (`comm.mean`). Called by `engine` and `zero`.
The table rests on benchmarks/comm_algorithms.py; see docs/adr/0006-shared-memory-collectives.md.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from deepspeed.comm import collectives
from deepspeed.comm.backend import BackendGatherer, BackendReducer, BackendReduceScatterer
from deepspeed.comm.board import Board, Progress
from deepspeed.comm.flat import (
    FlatAllReducer,
    FlatGatherer,
    FlatReduceScatterer,
    LocalGatherer,
    LocalReducer,
    LocalReduceScatterer,
    Record,
    ShardWork,
    Work,
    record_nothing,
)
from deepspeed.comm.mean import MeanRule
from deepspeed.comm.meter import METER
from deepspeed.comm.parts import BackendParts, LocalParts, PartsExchanger, SharedOrBackendParts, SharedParts, row_nbytes
from deepspeed.comm.patience import Patience
from deepspeed.comm.recorder import RECORDER
from deepspeed.comm.shared_memory import SharedMemory, share_memory
from deepspeed.comm.shared_reducer import SharedMemoryReducer
from deepspeed.comm.shared_shards import SharedMemoryGatherer, SharedMemoryReduceScatterer
from deepspeed.comm.staged import BackendSlots, LocalSlots, SharedSlots, Stage, shared_nbytes
from deepspeed.common.logging import log_dist_once
from deepspeed.errors import ArgumentError

__all__ = [
    "BackendGatherer",
    "BackendReduceScatterer",
    "BackendReducer",
    "FlatAllReducer",
    "FlatGatherer",
    "FlatReduceScatterer",
    "LocalGatherer",
    "LocalReduceScatterer",
    "LocalReducer",
    "PartsExchanger",
    "ShardWork",
    "Stage",
    "Work",
    "flat_all_reducer",
    "flat_gatherer",
    "flat_reduce_scatterer",
    "local_stage",
    "parameter_stage",
    "parts_exchanger",
    "record_as",
]

_ALL_TO_ALL = "all_to_all_single"

_PROGRESS = Progress()
"""What ranks of this process do for others while they wait; it knows buffers weakly, so nothing has to be reset."""

_EXCHANGERS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], PartsExchanger]] = (
    weakref.WeakKeyDictionary()
)
"""Of each group, by kind of device and use: layers share one, and the memory in it. They go with the group."""


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
    _check(numel, "flat_all_reducer", predivide_factor)
    place = _Place.of(device, group, timeout_seconds)
    if place.world_size == 1 or numel == 0:
        return LocalReducer(numel, dtype, place.device)
    rule = MeanRule(place.world_size, prescale, predivide_factor)
    communication_dtype = communication_dtype or dtype
    memory = place.share(numel, dtype, may_share_memory, "Gradients", "reduced")
    if memory is not None:
        return SharedMemoryReducer(
            memory, place.rank, place.ranks, rule, communication_dtype, place.patience(), record_as("all_reduce"), _PROGRESS
        )
    return BackendReducer(numel, dtype, place.device, group, place.ranks, rule, communication_dtype, place.backend_seconds)


def flat_reduce_scatterer(
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
) -> FlatReduceScatterer:
    """Build the fastest reduce-scatterer for a flat gradient buffer. Collective over `group`.

    On CPU a part of the result has the same bits as `flat_all_reducer` in shared memory gives.

    Args:
        numel: elements of the buffer, that of all W parts of all its ranges; the same on all ranks.
        dtype: as for `flat_all_reducer`, like all that follow.
        device: where the buffer lies.
        group: whose ranks the mean is taken over.
        timeout_seconds: how long a wait may take.
        communication_dtype: contributions are rounded to it and reduced in it.
        prescale: divide by the number of ranks before the sum instead of after.
        predivide_factor: divide by it before the sum and by world/factor after.
        may_share_memory: False keeps to the back end.

    Raises:
        ArgumentError: a size or factor that cannot be.
        CommError: ranks ask for different buffers (noticed where they share a host).
    """
    _check(numel, "flat_reduce_scatterer", predivide_factor)
    place = _Place.of(device, group, timeout_seconds)
    if place.world_size == 1 or numel == 0:
        return LocalReduceScatterer(numel, dtype, place.device)
    rule = MeanRule(place.world_size, prescale, predivide_factor)
    communication_dtype = communication_dtype or dtype
    memory = place.share(numel, dtype, may_share_memory, "Gradients", "reduced")
    if memory is not None:
        return SharedMemoryReduceScatterer(
            memory,
            place.rank,
            place.ranks,
            rule,
            communication_dtype,
            place.patience(),
            record_as("reduce_scatter_tensor"),
            _PROGRESS,
        )
    return BackendReduceScatterer(
        numel, dtype, place.device, group, place.ranks, rule, communication_dtype, place.backend_seconds
    )


def flat_gatherer(
    numel: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float | None = None,
    *,
    may_share_memory: bool = True,
    at_rest: torch.Tensor | None = None,
) -> FlatGatherer:
    """Build the fastest gatherer for a flat parameter buffer. Collective over `group`; all ranks give the same arguments.

    Args:
        numel: elements of the buffer, whole parameters or a shard; the same on all ranks.
        dtype: of the buffer.
        device: where it lies.
        group: whose ranks gather from each other; None means all ranks, or this process alone without a process group.
        timeout_seconds: how long a wait may take; None means the limit of the process group.
        may_share_memory: False keeps to the back end; one rank that says so decides for all.
        at_rest: the buffer itself, `numel` zeroed elements, where it lies elsewhere than on `device` (page-locked memory of
            the host): then only `gather` is of use, and this rank's part is copied to the device first.

    Raises:
        ArgumentError: a negative size.
        CommError: ranks ask for different buffers (noticed where they share a host).
    """
    _check(numel, "flat_gatherer")
    place = _Place.of(device, group, timeout_seconds)
    if place.world_size == 1 or numel == 0:
        return LocalGatherer(numel, dtype, place.device, at_rest=at_rest)
    if at_rest is not None:
        return BackendGatherer(numel, dtype, place.device, group, place.ranks, place.backend_seconds, at_rest=at_rest)
    memory = place.share(numel, dtype, may_share_memory, "Parameters", "gathered")
    if memory is not None:
        record = record_as("all_gather_into_tensor")
        return SharedMemoryGatherer(memory, place.rank, place.ranks, place.patience(), record, _PROGRESS)
    return BackendGatherer(numel, dtype, place.device, group, place.ranks, place.backend_seconds)


def parameter_stage(
    count: int,
    nbytes: int,
    allocate: Callable[[int], torch.Tensor],
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    timeout_seconds: float | None = None,
    *,
    may_share_memory: bool = True,
) -> Stage:
    """Build the stage that brings together what ranks read into `count` slots. Collective over `group`.

    Args:
        count: slots of each rank, at least 1; the same on all ranks, like all that follow.
        nbytes: of one slot, whole pages.
        allocate: makes this rank's slots where no memory is shared: bytes, as disks and devices want them.
        device: of what is gathered into.
        group: whose ranks gather from each other; None means all ranks, or this process alone without a process group.
        timeout_seconds: how long a wait may take; None means the limit of the process group.
        may_share_memory: False keeps to the back end; one rank that says so decides for all.

    Raises:
        ArgumentError: a count or size that cannot be.
        CommError: ranks ask for different slots (noticed where they share a host).
    """
    if not 0 < count < Board.SLOTS or nbytes < 1:
        raise ArgumentError(
            f"a stage of {count} slots of {nbytes} bytes was asked for; needed 1 to {Board.SLOTS - 1} slots of at least 1."
        )
    place = _Place.of(device, group, timeout_seconds)
    if place.world_size > 1:
        memory = place.share(
            shared_nbytes(count, nbytes), torch.uint8, may_share_memory, "Shards read from files", "gathered"
        )
        if memory is not None:
            record = record_as("all_gather_into_tensor")
            slots = SharedSlots(memory, count, place.rank, place.ranks, place.patience(), record, _PROGRESS)
            stage = Stage(slots)
            _PROGRESS.add(stage)
            return stage
    if place.world_size == 1:
        return local_stage(count, nbytes, allocate)
    own = [allocate(nbytes) for _ in range(count)]
    return Stage(BackendSlots(own, group, place.ranks, place.backend_seconds))


def local_stage(count: int, nbytes: int, allocate: Callable[[int], torch.Tensor]) -> Stage:
    """The stage of a rank that gathers from nobody else; parameters as for `parameter_stage`. Not collective."""
    return Stage(LocalSlots([allocate(nbytes) for _ in range(count)]))


def parts_exchanger(
    group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu", use: str = _ALL_TO_ALL
) -> PartsExchanger:
    """The fastest way to give parts of tensors on `device` to all ranks of `group`; the same object for the same group.

    Not collective; the first `exchange`, and one with larger parts than any before, are so in more than the parts: shared
    memory is agreed on then. Its time limit is that of the group.

    Args:
        group: whose ranks exchange; None means all ranks.
        device: where the parts lie.
        use: what it carries, "all_to_all_single" or "sums": each has an exchanger of its own. The comms log has all-to-alls;
            sums log themselves.
    """
    key = group if group is not None else dist.group.WORLD
    if key is None or key.size() == 1:
        return LocalParts()
    known = _EXCHANGERS.setdefault(key, {})
    kind = torch.device(device).type, use
    if kind not in known:
        known[kind] = _exchanger_at(_Place.of(device, group, None), weakref.ref(key), use)
    return known[kind]


def _exchanger_at(place: _Place, group: Callable[[], dist.ProcessGroup | None], use: str) -> PartsExchanger:
    """`group` is asked for late: what `_EXCHANGERS` holds must not keep the group alive."""
    backend = BackendParts(group, place.rank)
    record = record_as(_ALL_TO_ALL) if use == _ALL_TO_ALL else record_nothing

    def share(nbytes: int) -> SharedParts | None:
        here = replace(place, group=group())
        memory = here.share(row_nbytes(nbytes, here.world_size), torch.uint8, True, "Parts of tensors", "exchanged")
        if memory is None:
            return None
        return SharedParts(memory, here.rank, here.ranks, here.patience(), record, _PROGRESS)

    is_pretended = dist.get_backend(place.group) == "fake"  # `comm.pretended`: there is nobody to share with
    place = replace(place, group=None)
    return SharedOrBackendParts(share, backend) if place.device.type == "cpu" and not is_pretended else backend


def _check(numel: int, call: str, predivide_factor: float = 1.0) -> None:
    if numel < 0 or predivide_factor <= 0:
        raise ArgumentError(
            f"{call} got numel={numel}, predivide_factor={predivide_factor}; needed numel >= 0 and a factor > 0."
        )


@dataclass(frozen=True)
class _Place:
    """Where a buffer lies and which ranks meet over it. Without a process group this process is alone."""

    device: torch.device
    group: dist.ProcessGroup | None
    timeout_seconds: float | None
    rank: int
    ranks: list[int]
    """The global rank of each group rank."""

    @classmethod
    def of(cls, device: torch.device | str, group: dist.ProcessGroup | None, timeout_seconds: float | None) -> _Place:
        device = torch.device(device)
        if not dist.is_initialized():
            return cls(device, group, timeout_seconds, 0, [0])
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        return cls(device, group, timeout_seconds, dist.get_rank(group), ranks)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def backend_seconds(self) -> float | None:
        """The limit of a wait for the back end; on devices a wait only orders streams."""
        return self.timeout_seconds if self.device.type == "cpu" else None

    def patience(self) -> Patience:
        return Patience(_timeout_seconds(self.group) if self.timeout_seconds is None else self.timeout_seconds)

    def share(self, numel: int, dtype: torch.dtype, may_share_memory: bool, what: str, are: str) -> SharedMemory | None:
        """Give every rank a row of memory that all map, or None on all ranks. Collective on CPU."""
        if self.device.type != "cpu":
            return None
        memory = share_memory(
            numel, dtype, self.rank, self.world_size, lambda values: _gather(values, self.group), may_share_memory
        )
        if not isinstance(memory, str):
            return memory
        log_dist_once(
            f"{what} of ranks {self.ranks} are {are} by the back end, not through shared memory: {memory}.",
            ranks=self.ranks[:1],
            level=logging.DEBUG if not may_share_memory else logging.INFO,
        )
        return None


def _gather(values: list[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """All-gather of a list of integers, the same length on all ranks of `group`."""
    mine = torch.tensor(values, dtype=torch.int64)
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    collectives.all_gather(all_ranks, mine, group)
    return [each.tolist() for each in all_ranks]


def record_as(operation: str) -> Record:
    """Make the `Record` of means and gathers that no collective carries: it times them for the comms log and the meter."""

    def record(nbytes: int, world_size: int) -> Callable[[], None] | None:
        is_logged = RECORDER.enabled and RECORDER.wants(operation, prof=False)
        if not is_logged and not METER.is_on:
            return None
        name = f"{operation} | [Caller Func: {_outer_caller()}]" if RECORDER.debug else operation
        began = time.perf_counter()

        def finish() -> None:
            seconds = time.perf_counter() - began
            METER.add(operation, nbytes, seconds)
            if is_logged:
                RECORDER.append(operation, name, seconds * 1e3, nbytes, world_size)

        return finish

    return record


def _timeout_seconds(group: dist.ProcessGroup | None) -> float:
    """The limit that the group was made with; torch has no public way to ask, so its default stands in where it hides it."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # torch.distributed is initialized
    backend = group._get_backend(torch.device("cpu"))
    limit = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    assert isinstance(limit, timedelta)  # both sources are
    return limit.total_seconds()


def _outer_caller() -> str:
    """Name of the function that calls into this room; what runs between it and here is none of a reader's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("deepspeed.comm."):
        frame = frame.f_back
    return frame.f_code.co_name
