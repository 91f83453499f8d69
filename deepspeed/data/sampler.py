"""Samplers that can begin in the middle of an epoch.

Does not live here: the arithmetic of positions (`order`). Built by `loader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

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
        length = len(self.dataset)  # type: ignore[arg-type]
        positions = rank_positions(length, self.start, self.num_replicas, self.rank)
        if not self.shuffle:
            return iter(positions)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(length, generator=generator)
        return iter(order[torch.tensor(positions, dtype=torch.long)].tolist())


class SkippingSampler(Sampler[Any]):
    """A client's own sampler, of which the part before `start` is passed over without loading.

    Args:
        inner: yields this rank's indices, the same ones in each pass of one epoch.
        world_size: ranks that read at the same pace; turns the global `start` into a count of this rank's samples.
    """

    def __init__(self, inner: Sampler[Any], world_size: int) -> None:
        self.inner = inner
        self.world_size = world_size
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        """Indices of the client's sampler from `start` on."""
        return islice(iter(self.inner), self.start // self.world_size, None)

    def __len__(self) -> int:
        """Samples of this rank in a whole pass."""
        return len(self.inner)  # type: ignore[arg-type]
