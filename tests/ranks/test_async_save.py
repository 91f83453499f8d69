"""A save in the background is the save that a blocking one would have been at that moment, and disturbs nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint import Manifest, encode_client_state, open_checkpoint
from deepspeed.checkpoint.disk.storage import HashedFile, Storage
from deepspeed.checkpoint.save.engines import CheckpointEngine
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError, CommError
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import RanksFailed, run_ranks
from tests.unit.checkpoint.faulty_storage import Refusing

ROWS = 6
OPEN_AFTER_SECONDS = 0.3


class Gated(Storage):
    """Shards are not begun before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def create(self, path: Path) -> HashedFile:
        if path.name.startswith("rank_"):
            assert self.gate.wait(30)
        return super().create(path)


class KilledAtShard(Storage):
    """The process is killed in the middle of its shard."""

    def create(self, path: Path) -> HashedFile:
        file = super().create(path)
        if path.name.startswith("rank_"):
            file.write(memoryview(b"half a shard"))
            os.kill(os.getpid(), signal.SIGKILL)
        return file


def _engine(world_size: int, stage: int = 0, kind: str = "fp32", **checkpoint: Any) -> DeepSpeedEngine:
    precision: dict[str, Any] = {} if kind == "fp32" else {kind: {"enabled": True}}
    model = build(Mlp, dtype=torch.float32, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    blocks = zero(stage, reduce_bucket_size=200, stage3_param_persistence_threshold=20)
    settings = config(rows=ROWS // world_size, **precision, **blocks, checkpoint=checkpoint)
    return make_engine(model, settings, optimizer=optimizer)


def _batches(engine: DeepSpeedEngine, world_size: int, dtype: torch.dtype) -> Any:
    assert isinstance(engine.module, Mlp)
    whole = make_batches(engine.module, 4, 1, 1, rows=ROWS)
    return [[[tuple(t.chunk(world_size)[r].to(dtype) for t in m[0]) for r in range(world_size)] for m in s] for s in whole]


def _contents(folder: str, tag: str, world_size: int) -> tuple[object, list[torch.Tensor]]:
    """Everything that a checkpoint holds, but for the configuration of the engine that saved it."""
    source = open_checkpoint(folder, tag)
    tensors = {name: source.read(name) for name in source.names()}
    state = {key: value for key, value in source.state.items() if key != "ds_config"}
    own = [source.rank_state(rank) for rank in range(world_size)]
    return encode_client_state([tensors, state, source.client_state(), own])


def _save_at_once_and_behind(rank: int, world_size: int, folder: str, stage: int, kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    weights: list[dict[str, torch.Tensor]] = []
    for tag, blocks in (("at once", {}), ("behind", {"async_save": True})):
        torch.manual_seed(7)
        engine = _engine(world_size, stage, kind, **blocks)
        gated = Gated()
        engine.checkpoint_engine = CheckpointEngine(storage=gated)
        data = _batches(engine, world_size, dtype)
        train(engine, data[:2], rank)
        note = torch.arange(3.0)
        if tag == "at once":
            gated.gate.set()
        engine.save_checkpoint(folder, tag=tag, client_state={"note": note})
        note.fill_(len(weights))
        weights.append(train(engine, data[2:], rank).weights)
        assert engine._parts.checkpointing.saver.is_writing == (tag == "behind")
        gated.gate.set()
        engine.wait_for_checkpoint()
        engine.destroy()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    (plain, tensors), (plain_behind, tensors_behind) = (_contents(folder, tag, world_size) for tag in ("at once", "behind"))
    assert plain == plain_behind
    assert len(tensors) > 10
    assert all(torch.equal(one, other) for one, other in zip(tensors, tensors_behind, strict=True))


@pytest.mark.parametrize(
    ("world_size", "stage", "kind"),
    [(1, 0, "fp32"), (2, 0, "bf16"), (3, 1, "fp32"), (2, 2, "bf16"), (3, 3, "bf16"), (2, 3, "fp32")],
)
def test_a_background_save_holds_what_a_blocking_one_would_and_training_goes_on_alike(
    tmp_path: Path, world_size: int, stage: int, kind: str
) -> None:
    run_ranks(_save_at_once_and_behind, world_size, str(tmp_path), stage, kind)


def _save_twice(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, async_save=True)
    gated = Gated()
    engine.checkpoint_engine = CheckpointEngine(storage=gated)
    engine.save_checkpoint(folder, tag="one")
    assert not Path(folder, "one").exists()
    threading.Timer(OPEN_AFTER_SECONDS, gated.gate.set).start()
    engine.save_checkpoint(folder, tag="two")
    assert Path(folder, "one", "manifest.json").exists()
    path, _ = engine.load_checkpoint(folder)
    assert path == str(Path(folder, "two"))
    engine.destroy()


def test_a_second_save_and_a_load_wait_for_the_save_before(tmp_path: Path) -> None:
    run_ranks(_save_twice, 2, str(tmp_path))


def _fail_behind(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, stage=2, async_save=True)
    engine.save_checkpoint(folder, tag="good")
    engine.wait_for_checkpoint()
    usual = engine.checkpoint_engine
    refusing = Refusing(lambda name, path: name == "create" and path.name == "rank_00001.safetensors")
    for later in (
        engine.wait_for_checkpoint,
        lambda: engine.save_checkpoint(folder, tag="later"),
        lambda: engine.load_checkpoint(folder),
        engine.destroy,
    ):
        engine.checkpoint_engine = CheckpointEngine(storage=refusing)
        engine.save_checkpoint(folder, tag="bad")
        with pytest.raises(CheckpointError, match=r"save of checkpoint 'bad' in .* failed.*rank 1: could not write"):
            later()
        engine.checkpoint_engine = usual
        engine.wait_for_checkpoint()  # it is said once


def test_the_error_of_a_background_save_is_raised_on_every_rank_by_whatever_comes_next(tmp_path: Path) -> None:
    run_ranks(_fail_behind, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".py") == ["good", "latest"]
    assert (tmp_path / "latest").read_text() == "good"


def _refuse_state(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, async_save=True)
    with pytest.raises(CheckpointError, match=r"rank 0: .*client_state\['thing'\]"):
        engine.save_checkpoint(folder, tag="t", client_state={"thing": object()})
    assert not engine._parts.checkpointing.saver.is_writing
    engine.destroy()


def test_a_state_that_cannot_be_stored_is_refused_before_the_call_returns(tmp_path: Path) -> None:
    run_ranks(_refuse_state, 2, str(tmp_path))
    assert not list(tmp_path.iterdir())


def _train_while_a_rank_is_late(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, stage=3, async_save=True)
    gated = Gated()
    engine.checkpoint_engine = CheckpointEngine(storage=gated)
    data = _batches(engine, world_size, torch.float32)
    if rank == 0:
        gated.gate.set()
    engine.save_checkpoint(folder, tag="t")
    is_over = threading.Event()
    threading.Timer(5 * OPEN_AFTER_SECONDS, is_over.set).start()
    while _is_any(not is_over.is_set()):  # several times what makes a wait late
        train(engine, data[:1], rank)
    gated.gate.set()
    engine.wait_for_checkpoint()
    engine.destroy()
    comm.destroy_process_group()


def _is_any(flag: bool) -> bool:
    told = torch.tensor(int(flag))
    comm.all_reduce(told, op=comm.ReduceOp.MAX)
    return bool(told)


def test_the_watch_does_not_mind_a_rank_that_writes_for_long(tmp_path: Path) -> None:
    run_ranks(_train_while_a_rank_is_late, 2, str(tmp_path), env={"DEEPSPEED_WATCH_SECONDS": "0.3"})
    assert (tmp_path / "latest").read_text() == "t"


def _wait_for_each_other(rank: int, world_size: int, folder: str) -> str:
    engine = _engine(world_size, async_save=True)
    engine.save_checkpoint(folder, tag="t")
    engine.wait_for_checkpoint()
    with pytest.raises(CommError) as caught:
        comm.recv(torch.zeros(1), src=1 - rank)
    return str(caught.value)


def test_ranks_that_wait_for_each_other_are_told_so_after_a_background_save(tmp_path: Path) -> None:
    texts = run_ranks(_wait_for_each_other, 2, str(tmp_path), env={"DEEPSPEED_WATCH_SECONDS": "0.3"})
    assert all("ranks wait for each other" in text for text in texts)


def _take_the_group_down(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, async_save=True)
    gated = Gated()
    engine.checkpoint_engine = CheckpointEngine(storage=gated)
    engine.save_checkpoint(folder, tag="t")
    comm.destroy_process_group()
    gated.gate.set()
    engine.wait_for_checkpoint()
    engine._parts.checkpointing.saver.close()


def test_a_save_outlives_the_default_process_group(tmp_path: Path) -> None:
    run_ranks(_take_the_group_down, 2, str(tmp_path))
    assert open_checkpoint(tmp_path).tag == "t"


def _be_killed(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, async_save=True)
    engine.save_checkpoint(folder, tag="t", client_state={"number": 1})
    engine.wait_for_checkpoint()
    if rank == 1:
        engine.checkpoint_engine = CheckpointEngine(storage=KilledAtShard())
    engine.save_checkpoint(folder, tag="t", client_state={"number": 2})
    engine.wait_for_checkpoint()


def test_a_rank_killed_in_the_middle_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_be_killed, 2, str(tmp_path))
    assert {failure.rank: failure.kind for failure in caught.value.failures} == {0: "raised", 1: "died"}
    assert open_checkpoint(tmp_path).client_state() == {"number": 1}


def _step_with_a_save(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, writer={"decoupled": True})
    data = _batches(engine, world_size, torch.float32)
    gated = Gated()
    engine.checkpoint_engine = CheckpointEngine(storage=gated)
    engine.save_checkpoint(folder, tag="t")
    assert not Path(folder, "t").exists()
    threading.Timer(OPEN_AFTER_SECONDS, gated.gate.set).start()
    train(engine, data[:1], rank)
    assert Path(folder, "t", "manifest.json").exists()
    engine.destroy()


def test_a_decoupled_save_is_committed_when_the_next_step_is_over(tmp_path: Path) -> None:
    run_ranks(_step_with_a_save, 2, str(tmp_path))


def _save_over_the_limit(rank: int, world_size: int, folder: str) -> None:
    model = build(Mlp, dtype=torch.float32, seed=0)
    settings = config(rows=ROWS // world_size, datastates_ckpt={"host_cache_size": 1e-8})
    engine = make_engine(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    engine.save_checkpoint(folder, tag="t")
    assert Path(folder, "t", "manifest.json").exists()
    engine.destroy()


def test_a_copy_over_the_limit_is_not_made_and_the_save_blocks(tmp_path: Path) -> None:
    run_ranks(_save_over_the_limit, 2, str(tmp_path))


@pytest.mark.parametrize("unit", ["REPLICA", "MACHINE", "SOCKET"])
def test_the_unit_says_which_replicas_write(tmp_path: Path, unit: str) -> None:
    run_ranks(_save_by, 3, str(tmp_path), unit)
    manifest = Manifest.parse((tmp_path / "t" / "manifest.json").read_bytes(), "here")
    masters = [tensor for name, tensor in manifest.tensors.items() if name.startswith(("module/", "optimizer/"))]
    writers = {fragment.file for tensor in masters for fragment in tensor.fragments}
    ranks = range(3) if unit == "REPLICA" else range(1)  # all on one machine, and allowed on the same processors
    assert writers == {f"rank_0000{rank}.safetensors" for rank in ranks}


def _save_by(rank: int, world_size: int, folder: str, unit: str) -> None:
    engine = _engine(world_size, writer={"data_parallel": unit})
    train(engine, _batches(engine, world_size, torch.float32)[:1], rank)
    engine.save_checkpoint(folder, tag="t")
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    engine.destroy()
