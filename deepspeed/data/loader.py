"""DeepSpeedDataLoader: the micro-batches of one rank, and its place in the data as part of the training state.

    iter() -> sampler from `start` on -> torch DataLoader -> one micro-batch -> samples += micro-batch x ranks -> yield
                 ^                                                                                           |
                 '-- a place was loaded meanwhile: the pass that is going on jumps there <--------------------'

The place is `(epoch, samples, seed)`, with `samples` counted over all ranks (see `order`). It moves when a batch is handed
out, so a state taken after the update with that batch continues behind it. It is a place in its epoch: when another epoch is
set before the pass begins, that one is read from its start.

Not here: how a config becomes arguments (`engine.loader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.common.logging import get_logger
from deepspeed.data.sampler import ResumableSampler, SkippingSampler, StartedSampler
from deepspeed.errors import ArgumentError, UnbuiltFeatureError

State = dict[str, int]

logger = get_logger(__name__)


class _Place(NamedTuple):
    """Where the next pass begins."""

    epoch: int
    samples: int


class EpochCounter(Protocol):
    """The part of the throughput timer that a loader talks to."""

    def update_epoch_count(self) -> None:
        """A pass over the data begins."""


class DeepSpeedDataLoader:
    """Micro-batches of this rank; each `iter()` is a new pass, only the one after `load_state_dict` begins inside.

    Args:
        dataset: a map-style dataset, with `__getitem__` and `__len__`.
        batch_size: samples of one micro-batch.
        pin_memory: page-lock batches, where there is an accelerator to copy them to.
        local_rank: this rank on its host; kept for readers.
        tput_timer: told when a pass begins.
        collate_fn: makes a batch of a list of samples; None is torch's default.
        num_local_io_workers: processes that load; None is 0, loading in this one.
        data_sampler: yields this rank's indices, in place of the distributed sampler (shuffled, seed 0).
        data_parallel_world_size: ranks that see different data; None is all of the process group, 1 without one.
        data_parallel_rank: this one among them.
        dataloader_drop_last: leave out the last micro-batch of a pass when it is not full.
        deepspeed_dataloader_config: settings of curriculum sampling; empty or None.

    Raises:
        ArgumentError: the dataset has no positions, or a number makes no sense.
        UnbuiltFeatureError: curriculum sampling was asked for.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: EpochCounter | None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        _check(dataset, batch_size, deepspeed_dataloader_config)
        is_joined = comm.is_initialized()
        if data_parallel_world_size is None:
            data_parallel_world_size = comm.get_world_size() if is_joined else 1
        if data_parallel_rank is None:
            data_parallel_rank = comm.get_rank() if is_joined else 0
        self.dataset, self.batch_size, self.local_rank = dataset, batch_size, local_rank
        self.tput_timer = tput_timer
        self.post_process_func: Callable[[Any, Any], Any] | None = None
        self._world_size, self._rank = data_parallel_world_size, data_parallel_rank
        self._order: ResumableSampler | StartedSampler | SkippingSampler
        self.data_sampler: Any = data_sampler
        if data_sampler is None:
            self.data_sampler = self._order = ResumableSampler(dataset, self._world_size, self._rank)
        elif type(data_sampler) is DistributedSampler:
            self._order = StartedSampler(data_sampler)
        else:
            self._order = SkippingSampler(data_sampler, self._world_size)
        self._worker_seeds = torch.Generator()  # of its own: a pass must not draw from the generator that training uses
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._order,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and get_accelerator().device_name() != "cpu",
            drop_last=dataloader_drop_last,
            generator=self._worker_seeds,
        )
        self._samples = 0
        self._loaded: _Place | None = None

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole pass."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Micro-batches from the beginning of the order, or from the place that was loaded, be it while they are read."""
        is_at_end = False
        while not is_at_end:
            start = self._take_place()
            self._worker_seeds.manual_seed(
                (torch.initial_seed() + self._seed + self.epoch * self._world_size + self._rank) % 2**63
            )
            if self.tput_timer is not None:
                self.tput_timer.update_epoch_count()
            is_at_end = True
            for count, batch in enumerate(self._loader, start=1):
                self._samples = start + count * self.batch_size * self._world_size
                yield batch if self.post_process_func is None else self.post_process_func(batch, self.state_dict())
                if self._loaded is not None:
                    is_at_end = False
                    break
        self._samples = 0

    @property
    def epoch(self) -> int:
        """Number that the sampler's permutation is drawn for."""
        return int(getattr(self.data_sampler, "epoch", 0))

    def set_epoch(self, epoch: int) -> None:
        """Permute the next pass for `epoch`; a sampler without epochs is left alone."""
        if hasattr(self.data_sampler, "set_epoch"):
            self.data_sampler.set_epoch(epoch)

    def state_dict(self) -> State:
        """Place in the data: `epoch`, `samples` read by all ranks in this pass, `seed`, and the dataset's `length`."""
        return {"epoch": self.epoch, "samples": self._samples, "seed": self._seed, "length": self._length}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next pass begin at the place that `state_dict` names, at this world size and micro-batch.

        When the dataset's length has changed its order has too; the pass then begins at the start, with a warning.
        """
        if isinstance(self.data_sampler, ResumableSampler):
            self.data_sampler.seed = int(state_dict["seed"])
        self.set_epoch(int(state_dict["epoch"]))
        samples = int(state_dict["samples"])
        if state_dict["length"] != self._length:
            samples = 0
            logger.warning(
                "the data position was saved for %d samples, but the dataset has %d: epoch %d begins at its start. "
                "Give the same dataset to continue inside the epoch.",
                state_dict["length"],
                self._length,
                self.epoch,
            )
        self._loaded, self._samples = _Place(self.epoch, samples), samples
        if isinstance(self._order, SkippingSampler) and samples % self._world_size:
            logger.warning(
                "the data position is behind %d samples, which %d ranks cannot have read evenly: with the sampler %s, whose "
                "order the loader does not know, %d of them are read again. A DistributedSampler continues exactly.",
                samples,
                self._world_size,
                type(self.data_sampler).__name__,
                samples % self._world_size,
            )

    def rank_state_dict(self) -> dict[str, Any]:
        """What differs by rank: the generators that a client's sampler draws from (`SkippingSampler`); else empty."""
        return self._order.generators(is_inside=self._samples > 0) if isinstance(self._order, SkippingSampler) else {}

    def load_rank_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Counterpart of `rank_state_dict`, besides `load_state_dict`."""
        if isinstance(self._order, SkippingSampler):
            self._order.load_generators(state_dict)

    def _take_place(self) -> int:
        """Begin at the place that was loaded, if it is one of this epoch; return the samples that are behind it."""
        place, self._loaded = self._loaded, None
        start = place.samples if place is not None and place.epoch == self.epoch else 0
        self._order.start = self._samples = start
        return start

    @property
    def _length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def _seed(self) -> int:
        return int(getattr(self.data_sampler, "seed", 0))


def _check(dataset: object, batch_size: int, curriculum: Mapping[str, Any] | None) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ArgumentError(
            f"dataset is a {type(dataset).__name__}, which has no positions that ranks could share; one with __getitem__ "
            "and __len__ is needed. For a stream, iterate a torch DataLoader of your own whose dataset deals it to ranks."
        )
    if batch_size < 1:
        raise ArgumentError(f"batch_size={batch_size!r}, but at least 1 is needed.")
    if curriculum:
        raise UnbuiltFeatureError(
            f"deepspeed_dataloader_config={dict(curriculum)}: curriculum sampling is not built yet. Leave it out."
        )
