"""Pure integer arithmetic of partitions: no torch, no processes.

`layout` maps parameters to offsets in a padded flat buffer, cuts the buffer into buckets and equal shards, and answers which
piece of which parameter lies in any range. `cut` says which part of a parameter each rank of the tensor or expert axis
holds. Everything that needs an offset (memory, optimizer state, checkpoints, simulations) asks here.
"""

from deepspeed.sharding.cut import Cut, Span, even_widths
from deepspeed.sharding.layout import Bucket, FlatLayout, Fragment, Slot, effective_bucket_numel, even_range

__all__ = [
    "Bucket",
    "Cut",
    "FlatLayout",
    "Fragment",
    "Slot",
    "Span",
    "effective_bucket_numel",
    "even_range",
    "even_widths",
]
