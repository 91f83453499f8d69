"""How one engine writes and finds its checkpoints: who writes which part, when, and where the bytes go.

Does not live here: what goes into one (`saving`, `loading`), the files (the checkpoint room). Called by `engine.build`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed import comm
from deepspeed.checkpoint.agreement import ranks_of
from deepspeed.checkpoint.save.background import Saver
from deepspeed.checkpoint.save.engines import CheckpointEngine, checkpoint_engine_of, plan_of
from deepspeed.checkpoint.save.nodes import Nodes, NodeShares, find_nodes
from deepspeed.checkpoint.save.tiers import tiers_of
from deepspeed.checkpoint.save.write_share import WriteShares, own_place
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.checkpoint import WriterConfig
from deepspeed.topology.mesh import ParallelMesh

__all__ = ["Checkpointing"]


@dataclass
class Checkpointing:
    """The parts by role."""

    saver: Saver
    """Writes checkpoints, in the foreground or behind training."""

    engine: CheckpointEngine
    """Says where the bytes of checkpoints go."""

    write_shares: WriteShares | NodeShares
    """How ranks that hold the same values share in writing them."""

    nodes: Nodes | None
    """Where the ranks run, if every node saves to its own disk and loads from it."""

    @classmethod
    def of(cls, config: DeepSpeedConfig, mesh: ParallelMesh) -> Checkpointing:
        """What `config` asks for. Collective over the world where ranks must tell each other where they run."""
        block = config.checkpoint
        engine = checkpoint_engine_of(block, config.datastates_ckpt)
        plan = plan_of(block, config.datastates_ckpt, config.zero_optimization.stage)
        nodes = find_nodes(ranks_of(mesh.rank, mesh.world_size)) if block.use_node_local_storage else None
        saver = Saver(plan, mesh.rank, mesh.world_size, engine, tiers_of(block, config.nebula), nodes)
        engine.wait_for_save = saver.wait
        shares = _write_shares(block.writer, mesh) if nodes is None else NodeShares(mesh.rank, nodes)
        return cls(saver, engine, shares, nodes)

    def replace_engine(self, engine: CheckpointEngine) -> None:
        """Let `engine` say from the next save on where bytes go."""
        engine.wait_for_save = self.saver.wait
        self.engine = self.saver.owner = engine


def _write_shares(writer: WriterConfig | None, mesh: ParallelMesh) -> WriteShares:
    unit = None if writer is None else writer.data_parallel
    if unit is None or unit == "REPLICA" or mesh.world_size == 1:
        return WriteShares(mesh.rank)
    places: list[Any] = [None] * mesh.world_size
    comm.all_gather_object(places, own_place(unit))
    return WriteShares(mesh.rank, dict(enumerate(places)))
