"""Which runs of a rank's shard space lie where in the memory of a flat group. Pure arithmetic.

    parameters whole, W = 2      shard space  | b0 | b1 |         values  | b0 . | b1 . |     one extent per bucket
    sharded                      shard space  | b0 | b1 | b2 |    values  | b0 | b1 | b2 |    one extent
    sharded, b0, b1 on a tier    shard space  | b0 | b1 | b2 |    values  | b2 |              b0 and b1: one each, away

Called by `zero.flat`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from deepspeed.sharding import FlatLayout

__all__ = ["Extent", "extents_of"]


@dataclass(frozen=True)
class Extent:
    """Elements `[start, stop)` of shard space that lie in one piece elsewhere too."""

    start: int
    stop: int
    shift: int
    """In `values` they begin `shift` elements further on; without meaning where they are away."""

    away: int | None = None
    """Number of the bucket that these are, where it rests on a tier instead of in `values`."""


def extents_of(layout: FlatLayout, rank: int, *, is_sharded: bool, away: Collection[int] = ()) -> tuple[Extent, ...]:
    """The extents of `rank`, in the order of shard space.

    Args:
        layout: of the flat group.
        rank: of the shard axis.
        is_sharded: `values` holds this rank's shards alone, else everybody's.
        away: numbers of buckets that rest on a tier.
    """
    return tuple(_extents(layout, rank, is_sharded, away))


def _extents(layout: FlatLayout, rank: int, is_sharded: bool, away: Collection[int]) -> Iterator[Extent]:
    if not away and (is_sharded or layout.world_size == 1):
        yield Extent(0, layout.shard_numel, 0)
        return
    if not is_sharded:
        for bucket in layout.buckets:
            start, stop = layout.shard_range(bucket)
            yield Extent(start, stop, layout.owned(bucket, rank)[0] - start)
        return
    here: Extent | None = None
    held = 0  # elements of `values` so far
    for number, bucket in enumerate(layout.buckets):
        start, stop = layout.shard_range(bucket)
        if number in away:
            if here is not None:
                yield here
            here = None
            yield Extent(start, stop, 0, number)
        else:
            here = Extent(start, stop, held - start) if here is None else replace(here, stop=stop)
            held += stop - start
    if here is not None:
        yield here
