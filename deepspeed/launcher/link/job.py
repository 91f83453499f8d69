"""What a launcher knows about its job before it has spoken to anybody: the members, and where they meet. Pure.

Under pdsh and --no_ssh a member is a host; under MPI and Slurm, where the scheduler starts one launcher per rank, a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.launcher.hostfile import Slot

__all__ = ["LinkedJob", "linked_job"]

_DESCRIPTION_CHARACTERS = 1000


@dataclass(frozen=True)
class LinkedJob:
    """The job as every launcher of it must know it alike."""

    hosts: tuple[str, ...]
    """The host of each member, in the order of their numbers."""

    address: str
    port: int
    token: str
    has_front_end: bool
    """Whether a `deepspeed` command elsewhere started the members and will join them."""

    description: str
    """Hosts and slots, for comparison."""

    def name_of(self, member: int) -> str:
        """The member for messages: its host, and its rank where several members share a host."""
        host = self.hosts[member]
        return f"host {host}" if self.hosts.count(host) == 1 else f"rank {member} on host {host}"


def linked_job(
    world_info: Mapping[str, Sequence[Slot]],
    address: str,
    port: int,
    token: str,
    *,
    has_front_end: bool,
    is_per_rank: bool,
) -> LinkedJob:
    """The job over `world_info`; `is_per_rank`: each rank is a member."""
    counts = {host: len(slots) if is_per_rank else 1 for host, slots in world_info.items()}
    hosts = tuple(host for host, count in counts.items() for _ in range(count))
    description = " ".join(f"{host}:{len(slots)}" for host, slots in world_info.items())
    if len(description) > _DESCRIPTION_CHARACTERS:
        digest = hashlib.sha256(description.encode()).hexdigest()
        description = f"{len(world_info)} hosts, {description[:200]}... ({digest[:16]})"
    return LinkedJob(hosts, address, port, token, has_front_end, description)
