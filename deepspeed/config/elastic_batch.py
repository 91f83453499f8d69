"""One global batch for many numbers of ranks: the arithmetic of the block `elasticity`.

    micro-batches, limit --bases, highly composite multiples--> candidates --most counts--> train batch + counts that fit it
                                                                     count of ranks --> micro-batch and accumulation

Version 0.1 counts ranks. Version 0.2 counts nodes, so that a node is used whole and its model-parallel ranks stay on it; a
number of ranks that does not fit gets a batch of its own.

Pure, without torch. Does not live here: the keys (`elasticity`), the batch triangle of fixed batches (`batch`). Called by
`root` and by `deepspeed.elasticity`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from deepspeed.errors import ElasticityConfigError, ElasticityIncompatibleWorldSize

if TYPE_CHECKING:
    from deepspeed.config.elasticity import ElasticityConfig

__all__ = ["HIGHLY_COMPOSITE", "ElasticBatch", "ElasticSizes", "elastic_batch", "elastic_sizes"]

_RECORDS = (
    "1 2 4 6 12 24 36 48 60 120 180 240 360 720 840 1260 1680 2520 5040 7560 10080 15120 20160 25200 27720 45360 50400"
)
_LARGE_RECORDS = "55440 83160 110880 166320 221760 277200 332640 498960 554400 665280 720720"
HIGHLY_COMPOSITE = tuple(map(int, f"{_RECORDS} {_LARGE_RECORDS}".split()))
"""Numbers with more divisors than any smaller one: batches of so many micro-batches suit the most numbers of ranks."""


class ElasticBatch(NamedTuple):
    """A global batch and who can train with it."""

    train: int
    """Samples of all ranks per optimizer step; never above the limit."""

    counts: list[int]
    """Numbers of data-parallel ranks that can divide it into whole micro-batches, ascending."""


class ElasticSizes(NamedTuple):
    """The batch sizes for one number of ranks: train = micro x accumulation x data-parallel ranks."""

    train: int
    micro: int
    accumulation: int
    counts: list[int]
    """See `ElasticBatch`."""


def elastic_batch(block: ElasticityConfig, ranks: int | None = None) -> ElasticBatch:
    """Choose the batch.

    Args:
        block: enabled, and valid in itself.
        ranks: all ranks of the job, model-parallel ones included; only version 0.2 asks. None: the batch for most counts.

    Raises:
        ElasticityConfigError: no batch within the limit fits any count.
        ElasticityIncompatibleWorldSize: version 0.2, and these ranks fit no batch within the limit.
    """
    limit, micros = _limits(block)
    if block.version < 0.2:
        found = _best(micros, limit, (block.min_gpus, block.max_gpus), prefers_larger=block.prefer_larger_batch)
        return _required(found, block)
    per_node = block.num_gpus_per_node // block.model_parallel_size
    nodes = (max(1, block.min_gpus // block.num_gpus_per_node), block.max_gpus // block.num_gpus_per_node)
    found = _best(micros, limit // per_node, nodes, prefers_larger=block.prefer_larger_batch)
    if found is not None:
        found = ElasticBatch(found.train * per_node, [count * per_node for count in found.counts])
    if ranks is None:
        return _required(found, block)
    count = _data_parallel(block, ranks)
    return found if found is not None and count in found.counts else _batch_of_one(block, count)


def elastic_sizes(block: ElasticityConfig, ranks: int) -> ElasticSizes:
    """Choose the batch sizes for `ranks` ranks in all, model-parallel ones included.

    Raises:
        ElasticityConfigError: see `elastic_batch`.
        ElasticityIncompatibleWorldSize: the batch does not divide over so many ranks; the text names the nearest that fit.
    """
    batch = elastic_batch(block, ranks)
    count = _data_parallel(block, ranks)
    if count not in batch.counts:
        raise ElasticityIncompatibleWorldSize(
            f"{count} data-parallel ranks cannot share the elastic batch of {batch.train} samples: needed "
            f"{_nearest(batch.counts, count)} ranks. Start one of these counts, or let elasticity.version "
            "be 0.2, which finds a batch for every count."
        )
    micro = _micro_batch(block, batch.train, count, ranks)
    return ElasticSizes(batch.train, micro, batch.train // (micro * count), batch.counts)


def _limits(block: ElasticityConfig) -> tuple[int, list[int]]:
    limit, micros = block.max_train_batch_size, block.micro_batch_sizes
    if limit is None or not micros:
        raise ElasticityConfigError(
            f"elasticity has max_train_batch_size {limit} and micro_batch_sizes {micros}: both are needed. Give them, for "
            "example 2000 and [2, 4, 6]."
        )
    return limit, micros


def _best(micros: Sequence[int], limit: int, counts: tuple[int, int], *, prefers_larger: bool) -> ElasticBatch | None:
    """The candidate that fits most counts; None when none fits any."""
    options = [ElasticBatch(train, _fitting_counts(train, micros, counts)) for train in _candidates(micros, limit)]
    fitting = [option for option in options if option.counts]
    if not fitting:
        return None
    return max(fitting, key=lambda option: (len(option.counts), option.train if prefers_larger else -option.train))


def _candidates(micros: Sequence[int], limit: int) -> list[int]:
    """Of each base the largest highly composite multiple within the limit."""
    bases = {*micros, math.lcm(*micros)}
    return [base * max(h for h in HIGHLY_COMPOSITE if h <= limit // base) for base in sorted(bases) if base <= limit]


def _fitting_counts(train: int, micros: Sequence[int], counts: tuple[int, int]) -> list[int]:
    """Counts within the range over which `train` divides into whole micro-batches of one of the sizes."""
    low, high = counts
    return sorted(
        {
            count
            for micro in micros
            if train % micro == 0
            for parts in [train // micro]
            for count in range(low, min(high, parts) + 1)
            if parts % count == 0
        }
    )


def _required(found: ElasticBatch | None, block: ElasticityConfig) -> ElasticBatch:
    if found is None:
        raise ElasticityConfigError(
            f"no batch of up to {block.max_train_batch_size} samples divides into micro-batches of "
            f"{block.micro_batch_sizes} over {block.min_gpus} to {block.max_gpus} ranks. "
            "Raise elasticity.max_train_batch_size, add smaller micro_batch_sizes, or widen min_gpus and max_gpus."
        )
    return found


def _data_parallel(block: ElasticityConfig, ranks: int) -> int:
    """Of `ranks` ranks those that see different data."""
    if ranks < 1 or ranks % block.model_parallel_size:
        raise ElasticityIncompatibleWorldSize(
            f"{ranks} ranks with elasticity.model_parallel_size {block.model_parallel_size}: needed a multiple of it. Start "
            "another number of ranks."
        )
    return ranks // block.model_parallel_size


def _batch_of_one(block: ElasticityConfig, count: int) -> ElasticBatch:
    """The batch for a count that fits none for many: as near to the limit as one of the micro-batches allows."""
    limit, micros = _limits(block)
    whole = [limit // (micro * count) * micro * count for micro in micros]
    fitting = [train for train in whole if train > 0]
    if not fitting:
        raise ElasticityIncompatibleWorldSize(
            f"{count} data-parallel ranks with micro-batches of {min(micros)} or more samples make a batch of at least "
            f"{min(micros) * count}: needed at most elasticity.max_train_batch_size, {limit}. Start at most "
            f"{limit // min(micros)} ranks, raise the limit, or add a smaller size to micro_batch_sizes."
        )
    return ElasticBatch(max(fitting) if block.prefer_larger_batch else min(fitting), [count])


def _micro_batch(block: ElasticityConfig, train: int, count: int, ranks: int) -> int:
    """The largest size that fits; version 0.2 looks first at those that would fit if every rank saw different data."""
    _, micros = _limits(block)
    fitting = [micro for micro in micros if train // count % micro == 0]
    assert fitting  # `count` is one of the counts of `train`: each divides it into whole micro-batches of one of the sizes
    first = [micro for micro in fitting if train // ranks % micro == 0] or fitting
    return max(first) if block.prefer_larger_batch or block.version < 0.2 else first[0]


def _nearest(counts: Sequence[int], count: int) -> str:
    """The counts below and above, as words."""
    below = [str(c) for c in counts if c < count][-1:]
    above = [str(c) for c in counts if c > count][:1]
    return " or ".join(below + above)
