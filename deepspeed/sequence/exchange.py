"""Which heads and tokens go where in Ulysses: pure arithmetic, no torch.

    each rank holds a part of the sequence, all heads          each rank attends with its heads over the whole sequence

               tokens 0-3   tokens 4-7                                     heads 0 1   heads 2 3
    head 0 1 2 3  rank 0       rank 1          -- to heads -->   tokens 0-7   rank 0      rank 1
                                               <- to sequence -

Query heads are spread as evenly as whole heads can be. A rank gets the key and value heads that its query heads use; where
two ranks use the same one both get it, and its gradients from both are added.

Source: DeepSpeed Ulysses (arXiv:2309.14509), section 3; grouped heads as in Ulysses for ALST (arXiv:2506.13996), section
3.2. Lives here: head ranges, lengths, offsets. Called by `sequence.layer`, `sequence.hugging_face` and the loaders of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from deepspeed.errors import ArgumentError

__all__ = ["HeadPlan", "Lengths", "even_part"]


def even_part(total: int, rank: int, world_size: int) -> range:
    """What `rank` holds of `total` things that are spread as evenly as possible, in order."""
    return range(rank * total // world_size, (rank + 1) * total // world_size)


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each rank attends with.

        6 query heads in 3 groups, 2 ranks      rank 0: q 0 1 2, kv 0 1     rank 1: q 3 4 5, kv 1 2

    Raises:
        ArgumentError: a rank would have no head, or query heads do not fall into groups of equal size.
    """

    query_heads: int
    kv_heads: int
    world_size: int

    def __post_init__(self) -> None:
        if self.query_heads < self.world_size:
            raise ArgumentError(
                f"{self.query_heads} query heads over {self.world_size} sequence-parallel ranks leave ranks without a head; "
                f"needed at least one each. Use at most {self.query_heads} of them (sequence_parallel_size)."
            )
        if self.kv_heads < 1 or self.query_heads % self.kv_heads:
            raise ArgumentError(
                f"{self.query_heads} query heads with {self.kv_heads} key and value heads: the latter must divide the "
                "former. "
                "Pass whole heads: query (.., heads, head size), key and value (.., key and value heads, head size)."
            )

    @property
    def group_size(self) -> int:
        """Query heads that use one key and value head."""
        return self.query_heads // self.kv_heads

    def queries(self, rank: int) -> range:
        """Query heads of `rank`."""
        return even_part(self.query_heads, rank, self.world_size)

    def keys(self, rank: int) -> range:
        """Key and value heads that the query heads of `rank` use."""
        queries = self.queries(rank)
        return range(queries.start // self.group_size, (queries.stop - 1) // self.group_size + 1)

    def uses(self, rank: int) -> list[int]:
        """How many query heads of `rank` use each of its key and value heads."""
        queries, size = self.queries(rank), self.group_size
        return [min(queries.stop, (key + 1) * size) - max(queries.start, key * size) for key in self.keys(rank)]


@dataclass(frozen=True)
class Lengths:
    """Tokens of one sequence that each rank holds, in the order of ranks."""

    tokens: tuple[int, ...]

    @classmethod
    def equal(cls, length: int, world_size: int) -> Lengths:
        """Every rank holds `length` tokens."""
        return cls((length,) * world_size)

    @classmethod
    def spread(cls, total: int, world_size: int) -> Lengths:
        """`total` tokens as evenly as possible.

        Raises:
            ArgumentError: a rank would have none.
        """
        if total < world_size:
            raise ArgumentError(
                f"a sequence of {total} tokens over {world_size} sequence-parallel ranks leaves ranks without a token; "
                "needed "
                f"at least {world_size}. Pad it (sequence.pad_batch), or leave such samples out."
            )
        return cls(tuple(len(even_part(total, rank, world_size)) for rank in range(world_size)))

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.tokens)

    @cached_property
    def starts(self) -> Sequence[int]:
        """First token of each rank."""
        return [0, *accumulate(self.tokens)][:-1]
