"""How the experts of a rank are called in the whole model.

    expert-parallel rank 0   local 0, 1  ->  global 0, 1        optimizer shards name local experts, expert files global ones
    expert-parallel rank 1   local 0, 1  ->  global 2, 3

Data-parallel rank `d` of `D` is expert-parallel rank `d % ep_size`, or with `use_data_before_expert_parallelism`
`d // (D / ep_size)`; ranks of one expert-parallel rank share its experts' shards.
Pure. Called by `slices`, `rank_slices` and `completeness`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

__all__ = ["ExpertNames", "is_expert"]

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert."""
    return _EXPERT.fullmatch(name) is not None


@dataclass(frozen=True)
class ExpertNames:
    """Local and global names of experts.

    Args:
        locals_of: prefix up to `deepspeed_experts.` -> experts of that layer on each rank.
        is_data_first: neighbours in rank hold the same experts.
    """

    locals_of: dict[str, int] = field(default_factory=dict)
    is_data_first: bool = False

    @classmethod
    def of(cls, names: Iterable[str], *, is_data_first: bool = False) -> ExpertNames:
        """Count the experts in a rank's parameter names."""
        counts: dict[str, int] = {}
        for name in names:
            if found := _EXPERT.fullmatch(name):
                counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
        return cls(counts, is_data_first)

    def namer(self, expert_rank: int) -> Callable[[str], str]:
        """Local name on an expert-parallel rank -> global name; names of no expert stay."""

        def rename(name: str) -> str:
            found = _EXPERT.fullmatch(name)
            if found is None:
                return name
            return f"{found[1]}{expert_rank * self.locals_of[found[1]] + int(found[2])}{found[3]}"

        return rename

    def ranks_sharing(self, world_size: int, partition_count: int) -> list[tuple[int, list[int]]]:
        """Who shares a group's flat buffer when it is cut into `partition_count` parts: (expert-parallel rank, its ranks).

        All ranks share a dense group; of a group of experts there is one buffer for each expert-parallel rank.
        """
        expert_ranks = max(1, world_size // max(1, partition_count))
        if self.is_data_first:
            return [
                (rank, list(range(rank * partition_count, (rank + 1) * partition_count))) for rank in range(expert_ranks)
            ]
        return [(rank, list(range(rank, world_size, expert_ranks))) for rank in range(expert_ranks)]
