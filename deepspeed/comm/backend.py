"""Flat buffers through the back end: one asynchronous collective per range, for devices and for ranks on several hosts.

    BackendReducer            all-reduce, in place
    BackendReduceScatterer    nccl and its like: reduce-scatter          gloo: one scatter per rank brings each what it
                                                                         adds up; the sum is taken here, in rank order
    BackendGatherer           nccl and its like: all-gather              gloo: one broadcast per owner

Lives here: what is asked of the back end, and what is done with its answer inside `wait`. Does not live here: the calls
themselves (`comm.collectives`), the choice (`comm.algorithms`, the only caller), the arithmetic (`comm.mean`).

gloo's own reduce-scatter and all-gather take three to four times as long as these exchanges (benchmarks/comm_algorithms.py),
and its sums round at each hop where ours round once, to the bits that ranks sharing memory get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from deepspeed.comm import collectives
from deepspeed.comm.failures import WHERE_TO_LOOK
from deepspeed.comm.flat import DONE, Publication, ShardWork, Work, check_gathered, check_parts, check_target
from deepspeed.comm.mean import BlockMean, MeanRule, check_range, divide_, own_part
from deepspeed.errors import CommError, UsageError

__all__ = ["BackendGatherer", "BackendReduceScatterer", "BackendReducer", "backend_name", "complete_in_place"]


_MOST_EXCHANGES = 4
"""Exchanges in flight: each holds memory for what it receives, and two keep the network busy."""


def backend_name(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Name of the back end that serves tensors on `device` in a group; one group may have several."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # torch.distributed is initialized
    return str(group._get_backend(device).name()).lower()


def _takes_means(rule: MeanRule, backend: str) -> bool:
    """Whether the back end divides by itself, in the kernel that adds; of torch's own only nccl does."""
    return rule.before == 1.0 and backend == "nccl"


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
        self._timeout = _limit(timeout_seconds)
        is_plain = _takes_means(rule, dist.get_backend(group))
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
            return DONE
        target = self.buffer[start:stop]
        sent = target.to(self._dtype)  # the target itself where the dtype is the same
        divide_(sent, self._before)
        handle = collectives.all_reduce(sent, self._op, self._group, async_op=True)

        def finish() -> None:
            divide_(sent, self._after)
            if sent is not target:
                target.copy_(sent)

        what = f"the mean of gradient elements [{start}, {stop}) of {self.buffer.numel()}"
        return _BackendWork(handle, self._timeout, finish, what, self._ranks)

    def close(self) -> None:
        """See `FlatAllReducer`."""


class BackendReduceScatterer:
    """The reduce-scatterer that asks the back end: one asynchronous call per range."""

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
        """Allocate the buffer; parameters as for `BackendReducer`."""
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)
        self._group = group
        self._ranks = ranks
        self._rank = dist.get_rank(group)
        self._dtype = communication_dtype
        self._timeout = _limit(timeout_seconds)
        self._spare = _Spare(communication_dtype)
        backend = backend_name(group, device)
        self._mean = BlockMean(dtype, communication_dtype, rule) if (backend, device.type) == ("gloo", "cpu") else None
        is_plain = _takes_means(rule, backend)
        self._op = dist.ReduceOp.AVG if is_plain else dist.ReduceOp.SUM
        self._before, self._after = (1.0, 1.0) if is_plain else (rule.before, rule.after)
        self._busy: list[tuple[int, int, _BackendWork]] = []

    def launch(self, start: int, stop: int, into: torch.Tensor | None = None, *, accumulate: bool = False) -> ShardWork:
        """See `FlatReduceScatterer`."""
        check_parts(start, stop, self.buffer.numel(), len(self._ranks))
        check_target(into, (stop - start) // len(self._ranks), self.buffer.device, accumulate)
        self._check_free(start, stop)
        if start == stop:
            return DONE
        source = self.buffer[start:stop]
        own = self.buffer[slice(*own_part(start, stop, self._rank, len(self._ranks)))]
        target = own if into is None else into
        handle, finish = (
            self._reduce(source, own, target, accumulate)
            if self._mean is None
            else self._exchange(self._mean, source, target, accumulate)
        )
        what = f"the reduce-scatter of gradient elements [{start}, {stop}) of {self.buffer.numel()}"
        work = _BackendWork(handle, self._timeout, finish, what, self._ranks)
        self._busy.append((start, stop, work))
        return work

    def close(self) -> None:
        """See `FlatReduceScatterer`."""

    def _check_free(self, start: int, stop: int) -> None:
        self._busy = [(low, high, work) for low, high, work in self._busy if not work.is_over]
        for low, high, _ in self._busy:
            if start < high and low < stop:
                raise UsageError(
                    f"launch of [{start}, {stop}) while [{low}, {high}) of an older launch is on its way; call "
                    "wait_free() on that one before its elements are written and reduced again."
                )

    def _reduce(
        self, source: torch.Tensor, own: torch.Tensor, target: torch.Tensor, accumulate: bool
    ) -> tuple[dist.Work, Callable[[], None]]:
        sent = source.to(self._dtype)
        divide_(sent, self._before)
        # The back end writes to its target at once where nothing is left to do, else to the own part or to a copy of it.
        is_direct = sent is source and target.dtype is self._dtype and target.is_contiguous() and not accumulate
        copied = own if sent is source else sent.chunk(len(self._ranks))[self._rank]
        part = target if is_direct else copied
        handle = collectives.reduce_scatter_range(part, sent, self._op, self._group, async_op=True)

        def finish() -> None:
            divide_(part, self._after)
            mean = part.to(self.buffer.dtype)
            if accumulate:
                target.add_(mean)
            elif target is not part:
                target.copy_(mean)

        return handle, finish

    def _exchange(
        self, mean: BlockMean, source: torch.Tensor, target: torch.Tensor, accumulate: bool
    ) -> tuple[dist.Work, Callable[[], None]]:
        """Start the exchange; the sum is taken when they have come, the own part being read where it lies."""
        while len(self._busy) >= _MOST_EXCHANGES:
            self._busy.pop(0)[2].wait()
        part_numel = len(source) // len(self._ranks)
        scratch = [self._spare.take(len(source) - part_numel)]
        sent = source
        if source.dtype is not self._dtype:
            scratch.append(self._spare.take(len(source)))
            sent = scratch[-1].copy_(source)
        rows = list(scratch[0].chunk(len(self._ranks) - 1))
        rows.insert(self._rank, sent[self._rank * part_numel :][:part_numel])
        handle = collectives.exchange_range(rows, sent, self._group, async_op=True)

        def finish() -> None:
            mean.reduce(rows, 0, part_numel, target, accumulate)
            self._spare.give_back(scratch)

        return handle, finish


class _Spare:
    """Memory for what is received, used again: fresh memory costs more than the messages (each page is zeroed first)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._free: list[torch.Tensor] = []

    def take(self, numel: int) -> torch.Tensor:
        """1-D, `numel` elements of any content: the smallest that is long enough, or new."""
        fitting = [each for each in self._free if len(each) >= numel]
        if not fitting:
            self._free = []  # too short ones make room for longer ones
            return torch.empty(numel, dtype=self._dtype)
        whole = min(fitting, key=len)
        self._free = [each for each in self._free if each is not whole]
        return whole[:numel]

    def give_back(self, tensors: list[torch.Tensor]) -> None:
        """Take tensors that `take` gave for further use."""
        self._free += [torch.empty(0, dtype=self._dtype).set_(each.untyped_storage()) for each in tensors]


class BackendGatherer:
    """The gatherer that asks the back end. A finished call has read this rank's buffer, so no update waits for others."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        timeout_seconds: float | None = None,
        *,
        at_rest: torch.Tensor | None = None,
    ) -> None:
        """Allocate the buffer, or take `at_rest`; further parameters as for `BackendReducer`."""
        self.buffer = torch.zeros(numel, dtype=dtype, device=device) if at_rest is None else at_rest
        self._sample = torch.empty(0, dtype=dtype, device=device)
        self._group = group
        self._ranks = ranks
        self._rank = dist.get_rank(group)
        self._timeout_seconds = timeout_seconds
        self._publication = Publication()
        self._started: list[_BackendWork] = []

    def begin_update(self) -> None:
        """See `FlatGatherer`."""
        for work in self._started:
            work.wait()
        self._started = []
        self._publication.begin_update()

    def publish(self) -> None:
        """See `FlatGatherer`."""
        self._publication.check_writing()
        self._publication.publish()

    def gather_in_place(self, start: int, stop: int) -> Work:
        """See `FlatGatherer`."""
        self._publication.check_published()
        check_parts(start, stop, self.buffer.numel(), len(self._ranks))
        own = self.buffer[slice(*own_part(start, stop, self._rank, len(self._ranks)))]
        return self._start(self.buffer[start:stop], own, (start, stop))

    def gather(self, start: int, stop: int, into: torch.Tensor) -> Work:
        """See `FlatGatherer`."""
        self._publication.check_published()
        check_range(start, stop, self.buffer.numel())
        check_gathered(into, len(self._ranks) * (stop - start), self._sample)
        return self._start(into, self.buffer[start:stop], (start, stop))

    def view(self, start: int, stop: int) -> None:
        """See `FlatGatherer`: there are other ranks' parts."""

    def close(self) -> None:
        """See `FlatGatherer`."""

    def _start(self, whole: torch.Tensor, own: torch.Tensor, bounds: tuple[int, int]) -> Work:
        if not own.numel():
            return DONE
        mine = whole.chunk(len(self._ranks))[self._rank]
        is_read_there = own.device == whole.device and backend_name(self._group, whole.device) != "gloo"
        if mine.data_ptr() != own.data_ptr() and not is_read_there:
            mine.copy_(own, non_blocking=True)  # on a device: ahead of the collective, in the same stream
            own = mine
        what = f"the gather of parameter elements [{bounds[0]}, {bounds[1]}) of {self.buffer.numel()}"
        work = complete_in_place(whole, self._group, self._ranks, self._timeout_seconds, what, own=own)
        self._started = [each for each in self._started if not each.is_over]
        self._started.append(work)
        return work


def complete_in_place(
    whole: torch.Tensor,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    timeout_seconds: float | None,
    what: str,
    *,
    own: torch.Tensor | None = None,
) -> _BackendWork:
    """Start to complete `whole`, of which group rank q has the q-th of W equal parts right. Collective over `group`.

    Args:
        whole: contiguous; its parts fall on whole elements.
        group: whose ranks.
        ranks: the global rank of each group rank.
        timeout_seconds: how long the wait may take; None: the limit of the process group.
        what: names it in errors.
        own: the own part, where a back end that gathers may read it elsewhere; None: in its place.
    """
    if backend_name(group, whole.device) == "gloo":
        handle = collectives.broadcast_range(whole, group, async_op=True)
    else:
        own = whole.chunk(len(ranks))[dist.get_rank(group)] if own is None else own
        handle = collectives.gather_range(whole, own, group, async_op=True)
    return _BackendWork(handle, _limit(timeout_seconds), _nothing, what, ranks)


def _nothing() -> None:
    """What is left to do after a gather."""


def _limit(timeout_seconds: float | None) -> timedelta | None:
    return None if timeout_seconds is None else timedelta(seconds=timeout_seconds)


class _BackendWork:
    """One range on its way through the back end."""

    def __init__(
        self,
        handle: dist.Work,
        timeout: timedelta | None,
        finish: Callable[[], None],
        what: str,
        ranks: Sequence[int],
    ) -> None:
        self._handle: dist.Work | None = handle
        self._timeout = timeout
        self._finish = finish
        self._what = what
        self._ranks = ranks

    def wait(self) -> None:
        """Block until the result is there; raise CommError when the back end fails."""
        if self._handle is None:
            return
        try:
            self._handle.wait() if self._timeout is None else self._handle.wait(self._timeout)
        except RuntimeError as error:
            raise CommError(
                f"{self._what} over ranks {list(self._ranks)} failed in the back end: {error} {WHERE_TO_LOOK}"
            ) from error
        self._finish()
        self._handle, self._finish = None, _nothing  # lets go of tensors that were only sent

    @property
    def is_over(self) -> bool:
        """Whether it has been waited for."""
        return self._handle is None

    def wait_free(self) -> None:
        """Block as `wait` does: what the back end has finished it has read."""
        self.wait()
