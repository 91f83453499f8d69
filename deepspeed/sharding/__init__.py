"""Pure integer arithmetic of partitions: no torch, no processes.

`layout` maps parameters to offsets in a padded flat buffer, cuts the buffer into buckets and equal shards, and answers which
piece of which parameter lies in any range. `cut` says which part of a parameter each rank of the tensor or expert axis
holds, `recut` where such a part lies while another cut is stored. Everything that
needs an offset (memory, optimizer state, checkpoints, simulations) asks here.
"""

from deepspeed.sharding.cut import Cut, Span, even_widths
from deepspeed.sharding.layout import Bucket, FlatLayout, Fragment, Slot, effective_bucket_numel, even_range
from deepspeed.sharding.recut import Columns, Rows, rows_of, uncut

__all__ = [
    "Bucket",
    "Columns",
    "Cut",
    "FlatLayout",
    "Fragment",
    "Rows",
    "Slot",
    "Span",
    "effective_bucket_numel",
    "even_range",
    "even_widths",
    "rows_of",
    "uncut",
]
