"""Which ranks run on which node, and how the ranks of each node share the writing of what its disk must hold.

Lives here: the facts, and arithmetic on them. Does not live here: files (`node_save`, `node_load`). Called by the engine
when `checkpoint.use_node_local_storage` is set.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue

from deepspeed import comm
from deepspeed.checkpoint.agreement import Ranks, together
from deepspeed.checkpoint.save.write_share import Share, held_alike

__all__ = ["NodeShares", "Nodes", "find_nodes", "nodes_of"]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job."""

    node_of: tuple[int, ...]
    """Of each rank."""

    hosts: tuple[str, ...]
    """Name of each node's machine."""

    def leader(self, node: int) -> int:
        """The lowest rank of a node: it makes folders and commits there."""
        return self.node_of.index(node)

    def is_leader(self, rank: int) -> bool:
        """Whether `rank` is the lowest of its node."""
        return self.leader(self.node_of[rank]) == rank

    def ranks_beside(self, rank: int) -> list[int]:
        """All ranks on the node of `rank`, itself among them, in order."""
        return [other for other, node in enumerate(self.node_of) if node == self.node_of[rank]]

    def describe(self, node: int) -> str:
        """For people: `node 1 (machine-b)`."""
        return f"node {node} ({self.hosts[node]})"


def nodes_of(places: Sequence[tuple[str, int]]) -> Nodes:
    """Tell the nodes apart, whatever order the ranks were placed in.

    Two ranks are on one node when they have the same machine name and different local ranks; a local rank that comes again
    under the same name begins another node.

    Args:
        places: of each rank, the name of its machine and its local rank.
    """
    node_of: list[int] = []
    hosts: list[str] = []
    taken: list[set[int]] = []
    for host, local_rank in places:
        node = next((n for n, name in enumerate(hosts) if name == host and local_rank not in taken[n]), len(hosts))
        if node == len(hosts):
            hosts.append(host)
            taken.append(set())
        taken[node].add(local_rank)
        node_of.append(node)
    return Nodes(tuple(node_of), tuple(hosts))


def find_nodes(ranks: Ranks) -> Nodes:
    """Ask every rank where it runs. Collective over `ranks`; the local rank is the launcher's."""
    own: list[JsonValue] = [socket.gethostname(), comm.get_local_rank()]
    places = cast("list[list[str | int]]", together(ranks, lambda: own, lambda reports: reports))
    return nodes_of([(str(host), int(local_rank)) for host, local_rank in places])


class NodeShares:
    """Shares of one rank, in the shape of `write_share.WriteShares`: every node writes all that its ranks hold."""

    def __init__(self, rank: int, nodes: Nodes) -> None:
        """Take this global rank and the nodes of all."""
        self._rank = rank
        self._nodes = nodes

    def of(self, ranks: Sequence[int], beside: Sequence[int] = ()) -> Share:
        """This rank's share of what global ranks hold alike; arguments as for `WriteShares.of`."""
        node = self._nodes.node_of[self._rank]
        here = [rank for rank in held_alike(self._rank, ranks, beside) if self._nodes.node_of[rank] == node]
        return Share(len(here), here.index(self._rank))
