"""Where checkpoints lie: on each node's own disk, and in two tiers with retention."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint import list_tags, open_checkpoint
from deepspeed.checkpoint.save.node_merge import merge_nodes
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks

ROWS = 4
PER_NODE = 2
CASES = ((0, "fp32", False), (1, "bf16", True), (2, "fp32", False), (3, "bf16", False))
"""ZeRO stage, precision, in the background."""


def _engine(world_size: int, stage: int, kind: str = "fp32", **blocks: Any) -> DeepSpeedEngine:
    precision: dict[str, Any] = {} if kind == "fp32" else {kind: {"enabled": True}}
    model = build(Mlp, dtype=torch.float32, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    small = zero(stage, reduce_bucket_size=200, stage3_param_persistence_threshold=20)
    return make_engine(model, config(rows=ROWS // world_size, **precision, **small, **blocks), optimizer=optimizer)


def _batches(engine: DeepSpeedEngine, world_size: int) -> Any:
    assert isinstance(engine.module, Mlp)
    dtype = next(engine.module.parameters()).dtype
    whole = make_batches(engine.module, 4, 1, 1, rows=ROWS)
    return [[[tuple(t.chunk(world_size)[r].to(dtype) for t in m[0]) for r in range(world_size)] for m in s] for s in whole]


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _on_two_nodes(rank: int, world_size: int, root: str, stage: int, kind: str, asynchronous: bool) -> None:
    os.environ["LOCAL_RANK"] = str(rank % PER_NODE)  # what a launcher says on a node with two ranks
    folder = Path(root, f"node{rank // PER_NODE}")
    keys = {"use_node_local_storage": True, "async_save": asynchronous, "keep_last": 1}
    engine = _engine(world_size, stage, kind, checkpoint=keys)
    batches = _batches(engine, world_size)
    train(engine, batches[:1], rank)
    engine.save_checkpoint(folder, client_state={"note": torch.ones(2)})
    train(engine, batches[1:2], rank)
    engine.save_checkpoint(folder, client_state={"note": torch.ones(2)} if rank == 0 else None)
    expected = train(engine, batches[2:], rank)
    engine.destroy()
    own = [f"rank_{other:05d}.safetensors" for other in range(world_size) if other // PER_NODE == rank // PER_NODE]
    assert sorted(path.name for path in folder.glob("*/rank_*")) == own
    assert list_tags(folder) == ["global_step2"]  # keep_last, on every node

    again = _engine(world_size, stage, kind, checkpoint=keys)
    path, client_state = again.load_checkpoint(folder)
    assert path == str(folder / "global_step2")
    assert client_state is not None
    assert client_state["note"].tolist() == [1, 1]
    found = train(again, batches[2:], rank)
    assert found.losses == expected.losses
    assert _equal(found.weights, expected.weights)
    again.destroy()


def _at_another_stage(rank: int, world_size: int, root: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank % PER_NODE)
    folder = Path(root, f"node{rank // PER_NODE}")
    engine = _engine(world_size, 1, checkpoint={"use_node_local_storage": True})
    outcome = train(engine, _batches(engine, world_size)[:1], rank)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()

    other = _engine(world_size, 0, checkpoint={"use_node_local_storage": True})
    with pytest.raises(CheckpointError, match=r"safetensors on node [01] .*deepspeed-checkpoint merge"):
        other.load_checkpoint(folder)
    other.destroy()
    if rank == 0:
        merge_nodes([Path(root, f"node{node}", "t") for node in (0, 1)], Path(root, "all"), "t")
    comm.barrier()
    plain = _engine(world_size, 0)
    plain.load_checkpoint(Path(root, "all"))
    weights = dict(plain.module.state_dict())
    assert all(torch.equal(weights[name], outcome.weights[name]) for name in outcome.weights)
    plain.destroy()


def _in_two_tiers(rank: int, world_size: int, root: str) -> None:
    fast, slow = Path(root, "fast"), Path(root, "slow")
    nebula = {"enabled": True, "persistent_storage_path": str(slow), "persistent_time_interval": 3600}
    engine = _engine(world_size, 1, nebula=nebula, checkpoint={"async_save": True})
    batches = _batches(engine, world_size)
    for step in batches:
        train(engine, [step], rank)
        engine.save_checkpoint(fast)
    engine.destroy()
    comm.barrier()
    assert list_tags(slow) == ["global_step1"]
    assert list_tags(fast)[-2:] == ["global_step3", "global_step4"]

    again = _engine(world_size, 1, nebula=nebula)
    again.load_checkpoint(fast)
    assert again.global_steps == 4
    again.load_checkpoint(Path(root, "lost"))
    assert again.global_steps == 1
    again.load_checkpoint(fast, tag="global_step1")
    assert again.global_steps == 1
    again.destroy()


def _on_nodes(rank: int, world_size: int, root: str) -> None:
    """One start of processes for all cases: it costs more than they do."""
    for number, (stage, kind, asynchronous) in enumerate(CASES):
        _on_two_nodes(rank, world_size, f"{root}/{number}", stage, kind, asynchronous)
    _at_another_stage(rank, world_size, f"{root}/stages")


def test_each_node_saves_to_its_own_disk_goes_on_bit_for_bit_and_elsewhere_the_error_names_the_node(tmp_path: Path) -> None:
    run_ranks(_on_nodes, 4, str(tmp_path), init=False, timeout_seconds=120)


def test_checkpoints_are_copied_to_the_tier_that_stays_and_loaded_from_it(tmp_path: Path) -> None:
    run_ranks(_in_two_tiers, 2, str(tmp_path))
    source = open_checkpoint(tmp_path / "slow")  # with every hash
    assert source.state["global_steps"] == 1
