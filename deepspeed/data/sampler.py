"""Samplers that can begin in the middle of an epoch.

    ResumableSampler    the loader's own: any place, any world size
    StartedSampler      a client's DistributedSampler: the same order, so the same freedom
    SkippingSampler     any other of a client: its pass is drawn again from the same generators, and skipped into

Does not live here: the arithmetic of positions (`order`). Built by `loader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data.generators import get_host_state, set_host_state
from deepspeed.data.order import rank_positions


class ResumableSampler(DistributedSampler[Any]):
    """torch's DistributedSampler, reading the same samples in the same order, with a place to begin.

    Args:
        dataset: its length is all that is read.
        num_replicas: ranks that see different data.
        rank: this one among them.
        shuffle: permute the samples anew for each seed and epoch (`set_epoch`).
        seed: of the permutation.
    """

    def __init__(self, dataset: Dataset[Any], num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank, from the global position `start` on."""
        return _indices(self, self.start)


class StartedSampler(Sampler[Any]):
    """A client's DistributedSampler with a place to begin.

    Args:
        inner: of that very class: one with an order of its own is for `SkippingSampler`.
    """

    def __init__(self, inner: DistributedSampler[Any]) -> None:
        self.inner = inner
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank, from the global position `start` on."""
        return _indices(self.inner, self.start) if self.start else iter(self.inner)

    def __len__(self) -> int:
        """Samples of this rank in a whole pass."""
        return len(self.inner)


class SkippingSampler(Sampler[Any]):
    """A client's own sampler, of which the part before `start` is passed over without loading.

    A sampler that draws its order when a pass begins (torch's RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    draws the same order again, because the pass begins from the same generators: the host's, and a `torch.Generator` that
    the sampler keeps as `generator`.

    Args:
        inner: yields this rank's indices.
        world_size: ranks that read at the same pace; turns the global `start` into a count of this rank's samples.
    """

    def __init__(self, inner: Iterable[Any], world_size: int) -> None:
        self.inner = inner
        self.world_size = world_size
        self.start = 0
        self._drawn_from: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        """Indices of the client's sampler from `start` on."""
        loaded, self._loaded = self._loaded, {}
        self._set_own_state(loaded)
        skipped = self.start // self.world_size
        if not skipped or "host" not in loaded:
            self._drawn_from = {"host": get_host_state(), **self._own_state()}
            return islice(iter(self.inner), skipped, None)
        self._drawn_from, now = loaded, get_host_state()
        set_host_state(loaded["host"])
        try:
            indices = iter(self.inner)
            next(islice(indices, skipped, skipped), None)  # all draws of a pass happen at its first index
        finally:
            set_host_state(now)  # of training, which goes on from where it stood
        return indices

    def generators(self, *, is_inside: bool) -> dict[str, Any]:
        """Those that the present pass was drawn from or, when none is going on, those of the next besides the host's."""
        if self._loaded:
            return dict(self._loaded)
        return dict(self._drawn_from) if is_inside else self._own_state()

    def load_generators(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass from what `generators` gave."""
        self._loaded, self._drawn_from = dict(state), {}

    def __len__(self) -> int:
        """Samples of this rank in a whole pass."""
        return len(self.inner)  # type: ignore[arg-type]

    def _own_state(self) -> dict[str, Any]:
        generator = getattr(self.inner, "generator", None)
        return {"sampler": generator.get_state()} if isinstance(generator, torch.Generator) else {}

    def _set_own_state(self, state: Mapping[str, Any]) -> None:
        generator = getattr(self.inner, "generator", None)
        if "sampler" in state and isinstance(generator, torch.Generator):
            generator.set_state(state["sampler"])


def _indices(sampler: DistributedSampler[Any], start: int) -> Iterator[int]:
    """What the sampler's rank reads from the global position `start` on, in torch's order for its seed and epoch."""
    length = len(sampler.dataset)  # type: ignore[arg-type]
    positions = rank_positions(length, start, sampler.num_replicas, sampler.rank, drops_rest=sampler.drop_last)
    if not sampler.shuffle:
        return iter(positions)
    generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
    order = torch.randperm(length, generator=generator)
    return iter(order[torch.tensor(positions, dtype=torch.long)].tolist())
