"""The sum of a tensor over ranks that cannot go on without it: one all-reduce on the critical path of a layer.

    two ranks    start   my tensor -> where the other reads it          wait   mine += the other's
    more         start   part r of my tensor -> rank r                  wait   sum of my part over ranks, in their order
                                                                               -> all ranks; their sums -> my tensor

CPU ranks of one host meet in shared memory (`comm.parts`), 4 MiB at a time, so that a wait costs what the
slowest rank is late by; all others call the back end. Between `start` and `wait` a rank may compute.

Lives here: the sum, in place. Does not live here: which memory (`comm.algorithms`), means of gradients that overlap with a
backward (`comm.shared_reducer`). Called by `comm.differentiable`, `comm.vocabulary_loss` and `tensor_parallel`.

[Note: bits] Every rank holds the same bits: of two terms the sum does not depend on their order, and of more each element
is summed by one rank alone, in fp32 where the terms are narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm import collectives
from deepspeed.comm.algorithms import parts_exchanger, record_as
from deepspeed.comm.parts import PartsExchanger, part_nbytes, row_nbytes
from deepspeed.common.compiling import not_compiled

__all__ = ["all_reduce_now", "shared_nbytes_of_sums", "start_all_reduce"]

Group = dist.ProcessGroup | None
_record = record_as("all_reduce")
_PAIR = 2
_BLOCK_NBYTES = 4 << 20
"""What one exchange moves at most: shared memory holds two of them for each rank."""

_ADD: dict[Any, Callable[..., Tensor]] = {collectives.ReduceOp.SUM: torch.add, collectives.ReduceOp.MAX: torch.maximum}


class Work(Protocol):
    """A sum on its way."""

    def wait(self) -> Any:
        """Block until the tensor holds the sum over all ranks."""


@not_compiled
def all_reduce_now(x: Tensor, group: Group = None, op: Any = collectives.ReduceOp.SUM) -> None:
    """Make contiguous `x` the sum (or MAX) over the group's ranks, on each of them, and wait for it. Collective.

    Raises:
        CommError: a rank died, is late, or brings a tensor of another size.
    """
    start_all_reduce(x, group, op).wait()


@not_compiled
def start_all_reduce(x: Tensor, group: Group = None, op: Any = collectives.ReduceOp.SUM) -> Work:
    """Begin `all_reduce_now`; `x` may be read and written again after `wait`, and the group's next sum begins after it.

    Raises:
        CommError: as `all_reduce_now`; or the sum before was not waited for.
    """
    ranks = dist.get_world_size(group)
    exchanger = parts_exchanger(group, x.device, "sums")
    block_numel = _BLOCK_NBYTES // x.itemsize
    nbytes = _part_nbytes(x, min(x.numel(), block_numel), ranks)
    if not x.numel() or ranks == 1 or not exchanger.is_shared(nbytes):
        work: Work = collectives.all_reduce(x, op, group, async_op=True)
        return work
    done = _record(x.nbytes, ranks)
    way = _Way(exchanger, dist.get_rank(group), ranks, _ADD[op])
    sums = [way.pair(block) if ranks == _PAIR else way.parts(block) for block in torch.split(x.view(-1), block_numel)]
    next(sums[0])
    return _Blocks(sums, done)


class _Blocks:
    """The blocks of a tensor, one after another; the first has been brought."""

    def __init__(self, sums: list[Iterator[None]], done: Callable[[], None] | None) -> None:
        self._sums = sums
        self._done = done

    def wait(self) -> None:
        """See `Work`."""
        for block in self._sums:
            for _ in block:
                pass
        if self._sums and self._done is not None:
            self._done()
        self._sums = []


class _Way(NamedTuple):
    """How blocks of one tensor are summed. Each method brings what others need, stops once, and does the rest."""

    exchanger: PartsExchanger
    rank: int
    ranks: int
    add: Callable[..., Tensor]

    def pair(self, block: Tensor) -> Iterator[None]:
        """Bring the block; add what the other rank has brought."""
        arriving = self.exchanger.exchange([[block]] * 2, [[tuple(block.shape)]] * 2, self._nbytes(block))
        next(arriving)  # one's own
        yield
        for _, (other,) in arriving:
            self.add(block, other, out=block)

    def parts(self, block: Tensor) -> Iterator[None]:
        """Bring all parts; add up the own one, and collect the sums of the others."""
        parts = block.tensor_split(self.ranks)
        own, nbytes = parts[self.rank], self._nbytes(block)
        arriving = self.exchanger.exchange([[part] for part in parts], [[tuple(own.shape)]] * self.ranks, nbytes)
        terms = dict([next(arriving)])
        yield
        terms.update(arriving)
        total = terms[0][0].to(torch.promote_types(own.dtype, torch.float32) if own.is_floating_point() else own.dtype)
        for rank in range(1, self.ranks):
            total = self.add(total, terms[rank][0])
        own.copy_(total)
        sums = self.exchanger.exchange([[own]] * self.ranks, [[tuple(part.shape)] for part in parts], nbytes)
        for rank, (theirs,) in sums:
            if rank != self.rank:
                parts[rank].copy_(theirs)

    def _nbytes(self, block: Tensor) -> int:
        """Of this block's largest part, not of the largest block's: ranks compare it, and the last blocks may differ."""
        return _part_nbytes(block, block.numel(), self.ranks)


def _part_nbytes(x: Tensor, numel: int, ranks: int) -> int:
    part_numel = numel if ranks == _PAIR else -(-numel // ranks)
    return part_nbytes([(part_numel,)], [x.itemsize])


def shared_nbytes_of_sums(largest_nbytes: int, ranks: int) -> int:
    """What each of the CPU ranks of one host adds to the memory they sum in, if their largest tensor has so many bytes."""
    block = min(largest_nbytes, _BLOCK_NBYTES)
    part = block if ranks == _PAIR else -(-block // ranks)
    return row_nbytes(part_nbytes([(part,)], [1]), ranks) if largest_nbytes else 0
