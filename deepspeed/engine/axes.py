"""The ranks that ZeRO works among: other ones for experts than for what every rank holds.

    at a ZeRO stage >= 1     gradients averaged over     shard axis               replica axis
    dense                    data-parallel               data-parallel            this rank alone
    experts                  expert-data-parallel        expert-data-parallel     this rank alone

    at stage 0               the same                    this rank alone          those that gradients are averaged over

Lives here: the table. Does not live here: which parameters are experts' (`experts`), groups (`topology.mesh`). Used by
`partition`, `training`, `saving`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.topology.mesh import AxisGroup, ParallelMesh
from deepspeed.zero.flat import Kind

__all__ = ["ModelAxes", "ZeroAxes"]


class ZeroAxes(NamedTuple):
    """Those of one kind of parameters."""

    data: AxisGroup
    """Ranks that hold the same parameters and see different data: gradients are averaged over them."""

    shard: AxisGroup
    """Of these, ranks that hold different shards."""

    replica: AxisGroup
    """Of these, ranks that hold the same shards."""

    @classmethod
    def of(cls, data: AxisGroup, stage: int) -> ZeroAxes:
        """Those of a ZeRO stage."""
        rank = data.ranks[data.rank]
        alone = AxisGroup((rank,), rank)
        return cls(data, data, alone) if stage >= 1 else cls(data, alone, data)


@dataclass(frozen=True)
class ModelAxes:
    """Those of a model. Without experts on other ranks both kinds have the same."""

    dense: ZeroAxes
    experts: ZeroAxes

    whole: AxisGroup
    """Ranks whose gradients, those that count added up, are one whole model's, each element once."""

    has_replicas: bool
    """Whether ranks of `whole` hold the same."""

    @classmethod
    def of(cls, mesh: ParallelMesh, stage: int) -> ModelAxes:
        """Those of a mesh at a ZeRO stage."""
        dense = ZeroAxes.of(mesh.data_parallel, stage)
        if mesh.axis("expert").size > 1:
            is_pipeline = mesh.axis("pipe").size > 1
            whole = mesh.pipe_data if is_pipeline else mesh.data_parallel
            return cls(dense, ZeroAxes.of(mesh.expert_data_parallel, stage), whole, has_replicas=stage == 0)
        return cls(dense, dense, _whole(mesh, dense.shard), has_replicas=False)

    def of_kind(self, kind: Kind) -> ZeroAxes:
        """Those of one kind of parameters."""
        return self.experts if kind.is_expert else self.dense

    def counts(self, kind: Kind) -> bool:
        """Whether this rank's gradients of a kind count in sums over `whole`: of ranks that hold the same, one's do."""
        return not self.has_replicas or self.of_kind(kind).replica.rank == 0


def _whole(mesh: ParallelMesh, shard: AxisGroup) -> AxisGroup:
    if mesh.axis("pipe").size == 1:
        return shard
    return mesh.pipe_data if shard.size > 1 else mesh.axis("pipe")
