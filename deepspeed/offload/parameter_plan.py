"""Which shards of parameters rest in a file, where in it, and how large the buffers are that reads go through.

    units in order of use     u0    u1    u2    u3    u4
    max_in_cpu                memory memory                       the first of them: the step begins without a read, and
    file                                  |u2..|u3.|u4...|        what stays is never read nor written
                                          each at a page of its own

Pure arithmetic, with the same result on all ranks. Called by `engine.parameter_tier`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.errors import ConfigError
from deepspeed.offload.sub_groups import aligned

__all__ = ["BucketShard", "ParameterPlan", "plan_parameters"]


@dataclass(frozen=True)
class BucketShard:
    """One rank's shard of a bucket, that is of what one unit has of one kind of parameters."""

    group: int
    """Number of the flat group."""

    bucket: int
    """Number of the bucket in its layout."""

    unit: int
    """Units are numbered in the order of their use."""

    numel: int
    item_nbytes: int
    name: str
    """Of a parameter in it, for errors."""

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.item_nbytes


@dataclass(frozen=True)
class ParameterPlan:
    """What was planned. Nothing rests in a file where `offsets` is empty."""

    offsets: Mapping[tuple[int, int], int]
    """(group, bucket) of each shard that rests in the file -> where it begins there, bytes."""

    file_nbytes: int
    buffer_count: int
    buffer_nbytes: int


def plan_parameters(shards: Sequence[BucketShard], *, max_in_cpu: int, buffer_size: int, buffer_count: int) -> ParameterPlan:
    """Plan one rank's file.

    Buffers are no larger than the largest shard in the file, and no more than there are shards: what the configuration
    grants beyond that would be of no use.

    Args:
        shards: all of them, in any order.
        max_in_cpu: elements that stay in memory.
        buffer_size: elements of a buffer, at most.
        buffer_count: buffers, at most.

    Raises:
        ConfigError: a shard in the file is larger than a buffer, or there are no buffers.
    """
    away: list[BucketShard] = []
    left = max_in_cpu
    for shard in sorted(shards, key=lambda shard: (shard.unit, shard.group, shard.bucket)):
        if shard.numel <= left:
            left -= shard.numel
        else:
            away.append(shard)
    _check(away, buffer_size, buffer_count)
    offsets: dict[tuple[int, int], int] = {}
    end = 0
    for shard in away:
        offsets[shard.group, shard.bucket] = end
        end += aligned(shard.nbytes)
    largest = max((aligned(shard.nbytes) for shard in away), default=0)
    return ParameterPlan(offsets, end, min(buffer_count, len(away)), largest)


def _check(away: Sequence[BucketShard], buffer_size: int, buffer_count: int) -> None:
    if not away:
        return
    largest = max(away, key=lambda shard: shard.numel)
    if largest.numel > buffer_size:
        raise ConfigError(
            f"zero_optimization.offload_param.buffer_size = {buffer_size} elements, but one rank's shard of the unit with "
            f"{largest.name!r} has {largest.numel}, and a buffer must hold a whole one. Set buffer_size to at least "
            f"{largest.numel}, use more ranks, or set max_in_cpu to keep more in memory."
        )
    if buffer_count < 1:
        raise ConfigError(
            f"zero_optimization.offload_param.buffer_count = {buffer_count}, but what is read from NVMe needs a buffer. Set "
            "it to at least 1; 5 is the default, and more than 1 lets reads overlap with computation."
        )
