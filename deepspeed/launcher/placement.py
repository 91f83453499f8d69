"""Which rank runs where, and the variables that tell it so.

Pure arithmetic over the world info: no torch, no processes. `launch` calls it, once per host.

    world info {a: [0, 1], b: [0, 1]}, node_rank 1   --->   rank 2 (local 0), rank 3 (local 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.launcher.hostfile import ResourceError, Slot

__all__ = ["RankPlace", "place_of_rank", "place_ranks"]


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank in the job."""

    rank: int
    local_rank: int
    world_size: int
    local_size: int
    node_rank: int
    node_count: int

    def environment(self, master_addr: str, master_port: int) -> dict[str, str]:
        """The variables a training script reads to find its place and its peers."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": str(self.local_size),
            "CROSS_RANK": str(self.node_rank),
            "CROSS_SIZE": str(self.node_count),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }


def place_ranks(world_info: Mapping[str, Sequence[Slot]], node_rank: int) -> tuple[RankPlace, ...]:
    """The places of the ranks on host number `node_rank`.

    Ranks count up over the hosts in order, and over the slots of each.

    Raises:
        ResourceError: when there is no such host, or it has no slots.
    """
    if not 0 <= node_rank < len(world_info):
        raise ResourceError(
            f"--node_rank {node_rank}, but the job has {len(world_info)} hosts: give 0 to {len(world_info) - 1}."
        )
    sizes = [len(slots) for slots in world_info.values()]
    first, count = sum(sizes[:node_rank]), sizes[node_rank]
    if not count:
        raise ResourceError(f"host {list(world_info)[node_rank]!r} has no slots: give it some, or leave it out of the job.")
    return tuple(
        RankPlace(first + local_rank, local_rank, sum(sizes), count, node_rank, len(world_info))
        for local_rank in range(count)
    )


def place_of_rank(world_info: Mapping[str, Sequence[Slot]], rank: int) -> RankPlace:
    """The place of one rank.

    Raises:
        ResourceError: when there is no such rank.
    """
    for node_rank in range(len(world_info)):
        for place in place_ranks(world_info, node_rank):
            if place.rank == rank:
                return place
    count = sum(len(slots) for slots in world_info.values())
    raise ResourceError(
        f"rank {rank}, but the job has {count} ranks: ask the scheduler for as many as the hosts have slots."
    )
