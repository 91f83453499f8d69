"""A reduce-scatter made of all-reduces: every rank gets the whole mean and keeps its part (`reduce_scatter: false`).

    one rank's parts together    all-reduce [ 0 | 1 | 2 ]               `use_multi_rank_bucket_allreduce: true`
    or each by itself            all-reduce [ 0 ], [ 1 ], [ 2 ]         false: more and smaller collectives

It moves twice the bytes of a reduce-scatter; some back ends have a much faster all-reduce. Called by `engine.partition`.
"""

from __future__ import annotations

import itertools

import torch

from deepspeed.comm.flat import FlatAllReducer, ShardWork, Work, check_parts, check_target

__all__ = ["AllReduceScatterer"]


class AllReduceScatterer:
    """A `FlatReduceScatterer` on top of a `FlatAllReducer` over the same ranks."""

    def __init__(self, reducer: FlatAllReducer, rank: int, world_size: int, *, together: bool = True) -> None:
        """Store the reducer, this rank's position among `world_size`, and whether the parts of all ranks travel together."""
        self._reducer = reducer
        self._rank = rank
        self._world_size = world_size
        self._together = together

    @property
    def buffer(self) -> torch.Tensor:
        """See `FlatReduceScatterer`."""
        return self._reducer.buffer

    def launch(self, start: int, stop: int, into: torch.Tensor | None = None, *, accumulate: bool = False) -> ShardWork:
        """See `FlatReduceScatterer`."""
        check_parts(start, stop, self.buffer.numel(), self._world_size)
        part_numel = (stop - start) // self._world_size
        check_target(into, part_numel, self.buffer.device, accumulate)
        borders = range(start, stop + 1, part_numel) if part_numel and not self._together else (start, stop)
        works = [self._reducer.launch(low, high) for low, high in itertools.pairwise(borders)]
        own = self.buffer[start + self._rank * part_numel : start + (self._rank + 1) * part_numel]
        return _PartWork(works, own, into, accumulate)

    def close(self) -> None:
        """See `FlatReduceScatterer`."""
        self._reducer.close()


class _PartWork:
    def __init__(self, works: list[Work], own: torch.Tensor, into: torch.Tensor | None, accumulate: bool) -> None:
        self._works = works
        self._own = own
        self._into = into
        self._accumulate = accumulate

    def wait(self) -> None:
        """See `ShardWork`."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._into is not None:
            self._into.add_(self._own) if self._accumulate else self._into.copy_(self._own)
            self._into = None

    def wait_free(self) -> None:
        """See `ShardWork`: an all-reduce is over on all ranks at once."""
        self.wait()
