"""Where checkpoints lie: on each node's own disk, and in two tiers with retention."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from deepspeed import comm
from deepspeed.checkpoint import list_tags, open_checkpoint
from deepspeed.checkpoint.save.node_merge import merge_nodes
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError
from tests.support.cut_net import TensorUnit, cut_net, cuts_of
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


def _tensor_ranks_on_two_nodes(rank: int, world_size: int, root: str, stage: int, block: dict[str, Any]) -> None:
    """Two tensor ranks on each node; what both hold whole is written once there, or once in all."""
    os.environ["LOCAL_RANK"] = str(rank % PER_NODE)
    is_local = "use_node_local_storage" in block
    folder = Path(root, f"node{rank // PER_NODE}" if is_local else "shared")
    unit = TensorUnit(2)

    def engine() -> DeepSpeedEngine:
        model = cut_net().cut(unit.get_model_parallel_rank(), 2, unit.get_model_parallel_group())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return make_engine(model, config(1, 2, **zero(stage), checkpoint=block), mpu=unit, optimizer=optimizer)

    first = engine()
    batches = make_batches(cut_net(), 4, 1, 2, 2)
    train(first, batches[:2], unit.get_data_parallel_rank())
    first.save_checkpoint(folder, "t")
    cuts, whole = cuts_of(first.module), cut_net()
    expected = train(first, batches[2:], unit.get_data_parallel_rank())
    first.destroy()
    numels = {name: cuts[name].stored_starts()[-1] if name in cuts else p.numel() for name, p in whole.named_parameters()}
    comm.barrier()
    copies = 2 if is_local and stage == 0 else 1  # at stage 0 every node has all parts
    written = _numel_written(Path(root))
    assert written == copies * sum(numels.values()), f"{written} of {numels}, {copies} times"
    again = engine()
    again.load_checkpoint(folder, "t")
    found = train(again, batches[2:], unit.get_data_parallel_rank())
    assert found.losses == expected.losses
    assert _equal(found.weights, expected.weights)
    again.destroy()


def _numel_written(root: Path) -> int:
    """Of weights: what else is saved is not in float64."""
    total = 0
    for path in root.glob("*/t/rank_*.safetensors"):
        with safe_open(path, framework="pt") as file:
            keys = file.keys()
            slices = [file.get_slice(key) for key in keys]
            total += sum(math.prod(each.get_shape()) for each in slices if each.get_dtype() == "F64")
    return total


def _tensor_ranks(rank: int, world_size: int, root: str) -> None:
    for stage in (0, 1, 3):
        for key, block in (
            ("local", {"use_node_local_storage": True}),
            ("machine", {"writer": {"data_parallel": "MACHINE"}}),
        ):
            _tensor_ranks_on_two_nodes(rank, world_size, f"{root}/{stage}-{key}", stage, block)


def test_what_tensor_ranks_hold_alike_is_written_once_on_a_node(tmp_path: Path) -> None:
    run_ranks(_tensor_ranks, 4, str(tmp_path), timeout_seconds=60)
