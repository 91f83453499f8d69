"""The loader that an engine builds for a dataset: micro-batches of this rank.

Does not live here: the loader itself (`data`). Called by `engine.build`, and by `engine.deepspeed_io` in `members`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from deepspeed.comm.world import get_local_rank
from deepspeed.data import DeepSpeedDataLoader
from deepspeed.errors import ArgumentError

if TYPE_CHECKING:
    from deepspeed.common.timing import ThroughputTimer
    from deepspeed.config import DeepSpeedConfig
    from deepspeed.topology.mesh import ParallelMesh


def epoch_steps(dataset: Any, config: DeepSpeedConfig) -> int | None:
    """Updates in one pass over `dataset`, one at least; None where there is none, or it has no length."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    assert config.train_batch_size is not None  # the config has made the three sizes ints
    return max(1, len(dataset) // config.train_batch_size)


def build_loader(
    dataset: Any,
    config: DeepSpeedConfig,
    mesh: ParallelMesh,
    *,
    batch_size: int,
    is_training: bool = True,
    pin_memory: bool = True,
    sampler: Any = None,
    collate_fn: Any = None,
    workers: int | None = None,
    throughput: ThroughputTimer | None = None,
) -> DeepSpeedDataLoader:
    """Make a loader over the data-parallel ranks.

    Args:
        dataset: a torch Dataset.
        config: for `dataloader_drop_last`.
        mesh: who sees different data.
        batch_size: samples per micro-batch.
        is_training: count its micro-batches in the throughput timer.
        pin_memory: page-lock batches where the accelerator can.
        sampler: replaces the distributed sampler.
        collate_fn: as in torch's DataLoader.
        workers: loader processes.
        throughput: told when an epoch begins.

    Raises:
        ArgumentError: not a Dataset.
    """
    if not isinstance(dataset, Dataset) and not hasattr(dataset, "__getitem__"):
        raise ArgumentError(
            f"training data of type {type(dataset).__name__}: a torch Dataset (with __getitem__ and __len__) is needed. "
            "Wrap it in a Dataset, or feed the engine from a loader of your own."
        )
    return DeepSpeedDataLoader(
        dataset,
        batch_size=batch_size,
        pin_memory=pin_memory,
        local_rank=get_local_rank(),
        tput_timer=throughput if is_training else None,
        collate_fn=collate_fn,
        num_local_io_workers=workers,
        data_sampler=sampler,
        data_parallel_world_size=mesh.data_parallel.size,
        data_parallel_rank=mesh.data_parallel.rank,
        dataloader_drop_last=config.dataloader_drop_last,
    )
