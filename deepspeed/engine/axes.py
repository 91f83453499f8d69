"""The ranks that ZeRO works among: other ones for experts than for what every rank holds.

    at a ZeRO stage >= 1     gradients averaged over     shard axis               replica axis
    dense                    data x sequence             data x sequence          this rank alone
    experts                  expert-data x sequence      the same                 this rank alone

    at stage 0               the same                    this rank alone          those that gradients are averaged over

Tensor-parallel ranks hold parts of some parameters (`Kind.is_part`) and the whole of the others, each with shards of its own
among the ranks above. In a sum over the model parts count everywhere, the others on the first tensor-parallel rank.

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
    """Whether ranks of `whole` hold the same shards of some parameters, for lack of a shard axis."""

    tensor: AxisGroup
    """Ranks that hold other parts of the same parameters, for the same data."""

    parts: AxisGroup
    """Ranks that hold all shards of all parts of one parameter."""

    @classmethod
    def of(cls, mesh: ParallelMesh, stage: int) -> ModelAxes:
        """Those of a mesh at a ZeRO stage."""
        dense, tensor = ZeroAxes.of(mesh.zero_group, stage), mesh.axis("tensor")
        parts = mesh.stage_ranks if stage >= 1 else tensor
        if mesh.axis("expert").size > 1:
            experts = ZeroAxes.of(mesh.expert_zero_group, stage)
            return cls(dense, experts, mesh.world, has_replicas=stage == 0, tensor=tensor, parts=parts)
        whole = mesh.world if stage >= 1 else mesh.pipe_tensor
        return cls(dense, dense, whole, has_replicas=False, tensor=tensor, parts=parts)

    def of_kind(self, kind: Kind) -> ZeroAxes:
        """Those of one kind of parameters."""
        return self.experts if kind.is_expert else self.dense

    def counts(self, kind: Kind) -> bool:
        """Whether this rank's gradients of a kind count in sums over `whole`: of ranks that hold the same, one's do."""
        is_first_copy = kind.is_part or self.tensor.rank == 0
        return is_first_copy and (not self.has_replicas or self.of_kind(kind).replica.rank == 0)
