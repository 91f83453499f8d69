"""Which positions of an epoch's global order a rank reads, as pure arithmetic.

    global order   0 1 2 3 4 5 6 7 8 9          one permutation of the samples, the same on all ranks
    world size 3   0     3     6     9          rank 0
                     1     4     7     (0)      rank 1: padded from the start of the order
                       2     5     8     (1)    rank 2

After k samples on each rank exactly the first k * world size positions have been read. So "where training stands" is one
number, and training goes on from it at another world size with every sample still read once.

Does not live here: permutations (torch's, in `sampler`). Called by `sampler`.
"""

from __future__ import annotations


def rank_positions(length: int, start: int, world_size: int, rank: int, *, drops_rest: bool = False) -> list[int]:
    """Positions that `rank` reads of an order of `length`, from position `start` on.

    All ranks read equally many. When they do not come out even, the first positions of the order are read once more or,
    with `drops_rest`, the last ones are left out.
    """
    left = max(length - start, 0)
    per_rank = left // world_size if drops_rest else -(-left // world_size)
    return [(start + rank + i * world_size) % length for i in range(per_rank)]
