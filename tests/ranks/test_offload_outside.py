"""State on a disk between two updates: saved, loaded, read, edited, handed back; and what happens when the disk fails."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import ArgumentError, CheckpointError, ConfigError, FileIoError, UsageError
from deepspeed.offload.tier_file import TierFile
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio.engine import IoRequest
from deepspeed.ops.lamb import FusedLamb
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from tests.support.engines import config, make_engine, masters, model_weights, moments, train, zero
from tests.support.models import Batches, Branching, TiedGpt, build, make_batches
from tests.support.ranks import RanksFailed, run_ranks

BF16 = {"bf16": {"enabled": True}}
Whole = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Tensor]]]


def _nvme(folder: str, **keys: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True, **keys}


def _engine(offload: dict[str, Any] | None, stage: int = 3, seed: int = 0, **blocks: Any) -> DeepSpeedEngine:
    """In several sub-groups of 64 elements, most of them not in memory."""
    keys: dict[str, Any] = {"sub_group_size": 192, "stage3_param_persistence_threshold": 20}
    keys |= {} if offload is None else {"offload_optimizer": offload}
    settings = config(**zero(stage, **keys), gradient_clipping=0.3, **BF16, **blocks)
    model = build(TiedGpt, dtype=torch.float32, seed=seed)
    settings.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-2}})
    return make_engine(model, settings)


def _batches(world_size: int, first: int, steps: int) -> Batches:
    return make_batches(build(TiedGpt), 8, 1, world_size)[first : first + steps]


def _whole(engine: DeepSpeedEngine) -> Whole:
    return masters(engine), model_weights(engine), moments(engine)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(_same, a, b))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _resume(rank: int, world_size: int, folder: str) -> None:
    plain = _engine(None)
    train(plain, _batches(world_size, 0, 5), rank)
    wanted = _whole(plain)
    tiers: list[dict[str, Any] | None] = [None, {"device": "cpu"}, _nvme(folder + "/tier")]
    for number, tier in enumerate(tiers):
        save_dir = f"{folder}/{number}"
        saved = _engine(tier)
        train(saved, _batches(world_size, 0, 3), rank)
        saved.save_checkpoint(save_dir)
        train(saved, _batches(world_size, 3, 2), rank)
        assert _same(_whole(saved), wanted), f"a save changed the run with {tier}"
        for other in tiers:
            resumed = _engine(other, seed=1)
            train(resumed, _batches(world_size, 6, 1), rank)  # there is state that must be replaced
            resumed.load_checkpoint(save_dir)
            train(resumed, _batches(world_size, 3, 2), rank)
            assert _same(_whole(resumed), wanted), f"saved with {tier}, resumed with {other}"
            resumed.destroy()
        saved.destroy()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_goes_on_with_and_without_offload(world_size: int, tmp_path: Path) -> None:
    run_ranks(_resume, world_size, str(tmp_path), timeout_seconds=200)


def _save(rank: int, world_size: int, folder: str) -> Whole:
    engine = _engine(_nvme(folder + "/tier"), stage=3)
    train(engine, _batches(world_size, 0, 3), rank)
    engine.save_checkpoint(folder)
    return _whole(engine)


def _load(rank: int, world_size: int, folder: str, stage: int, is_offloaded: bool) -> Whole:
    engine = _engine(_nvme(folder + "/tier") if is_offloaded else None, stage=stage, seed=1)
    engine.load_checkpoint(folder)
    return _whole(engine)


@pytest.mark.parametrize(("stage", "world_size", "is_offloaded"), [(1, 3, True), (2, 1, True), (0, 3, False)])
def test_state_moves_to_other_ranks_and_stages(stage: int, world_size: int, is_offloaded: bool, tmp_path: Path) -> None:
    saved = run_ranks(_save, 2, str(tmp_path), timeout_seconds=100)[0]
    for loaded in run_ranks(_load, world_size, str(tmp_path), stage, is_offloaded, timeout_seconds=100):
        assert _same(loaded, saved)


def _save_behind(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(_nvme(folder + "/tier"), checkpoint={"async_save": True})
    train(engine, _batches(world_size, 0, 3), rank)
    wanted = _whole(engine)
    engine.save_checkpoint(folder)
    train(engine, _batches(world_size, 3, 2), rank)  # changes the files that were copied
    engine.wait_for_checkpoint()
    engine.load_checkpoint(folder)
    assert _same(_whole(engine), wanted)


def test_a_background_save_holds_the_state_of_its_moment(tmp_path: Path) -> None:
    run_ranks(_save_behind, 2, str(tmp_path), timeout_seconds=100)


# -- reading and editing ----------------------------------------------------------------------------------------------


def _edit(engine: DeepSpeedEngine) -> None:
    """Change some of everything, through every function that there is."""
    for number, param in enumerate(engine.module.parameters()):
        value, state = safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")
        assert value is not None
        assert state is not None
        if number % 2:
            safe_set_full_fp32_param(param, value * 1.5)
            safe_set_full_optimizer_state(param, state + 0.25, "exp_avg")
        else:
            local, local_state = safe_get_local_fp32_param(param), safe_get_local_optimizer_state(param, "exp_avg_sq")
            assert local is not None
            safe_set_local_fp32_param(param, local - 0.125)
            if local_state is not None:
                safe_set_local_optimizer_state(param, local_state * 2, "exp_avg_sq")


def _edits(rank: int, world_size: int, folder: str) -> None:
    found = []
    for offload in (None, _nvme(folder)):
        engine = _engine(offload, stage=2)
        train(engine, _batches(world_size, 0, 2), rank)
        _edit(engine)
        edited = _whole(engine)
        train(engine, _batches(world_size, 2, 2), rank)
        found.append((edited, _whole(engine)))
        engine.destroy()
    assert _same(*found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_between_updates_count(world_size: int, tmp_path: Path) -> None:
    run_ranks(_edits, world_size, str(tmp_path), timeout_seconds=100)


def _state_dicts(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(_nvme(folder))
    train(engine, _batches(world_size, 0, 2), rank)
    given = engine.optimizer.state_dict()
    tensors = [v for state in given["optimizer"]["state"].values() for v in state.values() if isinstance(v, Tensor)]
    assert tensors
    assert all(tensor.device.type == "cpu" for tensor in tensors)  # all of it is there to be pickled
    before = moments(engine)
    train(engine, _batches(world_size, 2, 2), rank)
    engine.optimizer.load_state_dict(given)
    assert _same(moments(engine), before)
    state = next(iter(engine.optimizer.optimizer.state.values()))
    with pytest.raises((NotImplementedError, RuntimeError)):  # meta: an error, not zeros
        state["exp_avg"].sum().item()


def test_state_dicts_hold_everything(tmp_path: Path) -> None:
    run_ranks(_state_dicts, 1, str(tmp_path))


def _moved(rank: int, world_size: int, folder: str) -> None:
    found = []
    for is_moved in (False, True):
        engine = _engine(_nvme(folder))
        train(engine, _batches(world_size, 0, 2), rank)
        if is_moved:
            for state in engine.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = state[key].to(torch.device("cpu"), non_blocking=True).cpu()
            with pytest.raises(NotImplementedError):  # that would take values
                state["exp_avg"].to("cpu", torch.float64)
        train(engine, _batches(world_size, 2, 2), rank)
        found.append(_whole(engine))
        engine.destroy()
    assert _same(*found)


def test_state_on_a_disk_stays_there_when_a_client_moves_all_state(tmp_path: Path) -> None:
    """As Lightning does when a run ends: every entry of `optimizer.state` goes to the CPU and is put back."""
    run_ranks(_moved, 2, str(tmp_path))


def _hand_back(rank: int, world_size: int, folder: str) -> None:
    for offload in ({"device": "cpu"}, _nvme(folder)):
        model = build(TiedGpt, dtype=torch.float32)
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
        engine = make_engine(model, config(**zero(2, offload_optimizer=offload, sub_group_size=192)), optimizer=optimizer)
        train(engine, _batches(world_size, 0, 2), rank)
        wanted = moments(engine) if offload["device"] == "cpu" else {}  # from a disk nothing is brought into memory
        engine.destroy()
        found = {
            name: {key: value for key, value in optimizer.state[param].items() if key != "step"}
            for name, param in model.named_parameters()
            if param in optimizer.state
        }
        assert _same(found, wanted)
        assert list(Path(folder).iterdir()) == []


def test_an_optimizer_gets_state_back_that_is_in_memory(tmp_path: Path) -> None:
    run_ranks(_hand_back, 1, str(tmp_path))


def _sgd_resumed(rank: int, world_size: int, folder: str) -> None:
    found = []
    for offload in (None, _nvme(folder)):
        keys = {"stage3_param_persistence_threshold": 20, "sub_group_size": 192}
        keys |= {} if offload is None else {"offload_optimizer": offload}
        sgd = {"type": "SGD", "params": {"lr": 1e-1, "momentum": 0.9}}
        settings = config(**zero(3, **keys), optimizer=sgd, zero_allow_untested_optimizer=True)
        engine = make_engine(build(Branching), settings)
        batches = make_batches(build(Branching), 4, 1, world_size)
        train(engine, batches[:2], rank)
        engine.save_checkpoint(folder + "/saved")
        train(engine, batches[2:], rank)
        wanted = _whole(engine)
        engine.load_checkpoint(folder + "/saved")
        train(engine, batches[2:], rank)
        assert _same(_whole(engine), wanted)
        found.append(wanted)
        engine.destroy()
    assert _same(*found)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sgd_goes_on_where_a_rank_holds_padding_alone(world_size: int, tmp_path: Path) -> None:
    run_ranks(_sgd_resumed, world_size, str(tmp_path))


def _skip(rank: int, world_size: int, folder: str) -> None:
    found = []
    for offload in (None, _nvme(folder)):
        keys = {} if offload is None else {"offload_optimizer": offload}
        blocks = {"fp16": {"enabled": True, "initial_scale_power": 8}, "optimizer": {"type": "AdamW"}}
        engine = make_engine(build(TiedGpt, dtype=torch.float32), config(**zero(2, sub_group_size=192, **keys), **blocks))
        train(engine, _batches(world_size, 0, 2), rank)
        loss = engine(*_batches(world_size, 2, 1)[0][0][rank])
        engine.backward(loss * (float("inf") if rank == world_size - 1 else 1.0))
        engine.step()
        assert not engine.was_step_applied()
        train(engine, _batches(world_size, 3, 2), rank)
        found.append((_whole(engine), engine.skipped_steps))
        engine.destroy()
    assert found[0][1] == found[1][1] == 1
    assert _same(found[0][0], found[1][0])


def test_a_skipped_step_leaves_everything_as_it_was(tmp_path: Path) -> None:
    run_ranks(_skip, 2, str(tmp_path))


def _two(rank: int, world_size: int, folder: str) -> None:
    first, second = _engine(_nvme(folder)), _engine(_nvme(folder), seed=1)
    for step in range(3):
        for engine in (first, second):
            train(engine, _batches(world_size, step, 1), rank)
    for seed, engine in enumerate((first, second)):
        alone = _engine(None, seed=seed)
        train(alone, _batches(world_size, 0, 3), rank)
        assert _same(_whole(engine), _whole(alone))


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    run_ranks(_two, 2, str(tmp_path), timeout_seconds=100)


# -- faults -----------------------------------------------------------------------------------------------------------


def _cut(folder: str, rank: int) -> None:
    """Rank 1's files lose all that is in them."""
    if rank == 1:
        (own,) = Path(folder).glob("deepspeed-tier-*rank1*")
        for file in own.iterdir():
            os.truncate(file, 0)


def _cut_short(rank: int, world_size: int, folder: str, stage: int) -> str:
    undisturbed = _engine(None, stage)
    train(undisturbed, _batches(world_size, 0, 4), rank)
    engine = _engine(_nvme(folder), stage)
    train(engine, _batches(world_size, 0, 2), rank)
    engine.save_checkpoint(folder + "/saved")
    _cut(folder, rank)
    with pytest.raises(FileIoError) as failure:
        train(engine, _batches(world_size, 2, 1), rank)
    for look in (lambda: train(engine, _batches(world_size, 2, 1), rank), lambda: masters(engine), lambda: moments(engine)):
        with pytest.raises(UsageError, match=r"failed half way\. Load a checkpoint"):
            look()
    for _ in range(2):  # the second time nothing has failed, but files are cut again
        engine.load_checkpoint(folder + "/saved")
        _cut(folder, rank)
    engine.load_checkpoint(folder + "/saved")
    train(engine, _batches(world_size, 2, 2), rank)
    assert _same(_whole(engine), _whole(undisturbed))  # good as new
    engine.destroy()
    return str(failure.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_that_became_shorter_is_an_error_on_all_ranks_and_a_load_mends_it(stage: int, tmp_path: Path) -> None:
    texts = run_ranks(_cut_short, 3, str(tmp_path), stage, timeout_seconds=100)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1 cannot read ")
    assert "the file ends at byte" in texts[0]
    assert not list(tmp_path.glob("deepspeed-tier-*"))


def _fails_in_a_load(rank: int, world_size: int, folder: str) -> str:
    engine = _engine(_nvme(folder), 3)
    assert len(engine._parts.partition.flats) > 1  # a rank must not enter the second while another leaves the first
    train(engine, _batches(world_size, 0, 2), rank)
    engine.save_checkpoint(folder + "/saved")
    wanted = _whole(engine)

    def fail(file: TierFile, start: int, of: Tensor) -> None:
        raise FileIoError(errno.EIO, f"cannot write {file.file.path}: this disk is made to fail")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(TierFile, "write", fail)
        with pytest.raises(FileIoError) as failure:
            engine.load_checkpoint(folder + "/saved")
    engine.load_checkpoint(folder + "/saved")
    assert _same(_whole(engine), wanted)
    engine.destroy()
    return str(failure.value)


def test_a_disk_that_fails_during_a_load_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    texts = run_ranks(_fails_in_a_load, 2, str(tmp_path))
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1 cannot write ")


def _fails_when_a_save_reads(rank: int, world_size: int, folder: str, stage: int) -> str:
    undisturbed = _engine(None, stage)
    train(undisturbed, _batches(world_size, 0, 4), rank)
    engine = _engine(_nvme(folder), stage)
    for (micro_batch,) in _batches(world_size, 0, 2):  # nobody looks: what was stepped last is in memory alone
        engine.backward(engine(*micro_batch[rank]))
        engine.step()
    wait = IoRequest.wait

    def fail(request: IoRequest) -> None:
        wait(request)
        if request.is_write and "deepspeed-tier" in str(request.file.path):
            raise FileIoError(errno.EIO, f"cannot write {request.file.path}: this disk is made to fail.")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(IoRequest, "wait", fail)
        with pytest.raises(CheckpointError) as failure:
            engine.save_checkpoint(folder + "/saved")
    train(engine, _batches(world_size, 2, 2), rank)
    engine.save_checkpoint(folder + "/saved")
    assert _same(_whole(engine), _whole(undisturbed))  # nothing was lost
    resumed = _engine(_nvme(folder), stage, seed=1)
    resumed.load_checkpoint(folder + "/saved")
    assert _same(_whole(resumed), _whole(undisturbed))
    return str(failure.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_late_write_that_fails_is_an_error_of_the_save_on_all_ranks(stage: int, tmp_path: Path) -> None:
    texts = run_ranks(_fails_when_a_save_reads, 2, str(tmp_path), stage)
    assert len(set(texts)) == 1
    assert re.match(r"rank 1: could not write .*: cannot write .*deepspeed-tier-.*this disk is made to fail", texts[0])


def _destroyed_after_a_fault(rank: int, world_size: int, folder: str) -> None:
    model = build(TiedGpt, dtype=torch.float32)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    engine = make_engine(model, config(**zero(3, offload_optimizer=_nvme(folder), sub_group_size=192)), optimizer=optimizer)
    train(engine, _batches(world_size, 0, 2), rank)
    for file in next(Path(folder).iterdir()).iterdir():
        os.truncate(file, 0)
    with pytest.raises(FileIoError):
        train(engine, _batches(world_size, 2, 1), rank)
    engine.destroy()
    assert list(Path(folder).iterdir()) == []
    assert not optimizer.state
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}


def test_an_engine_is_taken_apart_after_a_fault_too(tmp_path: Path) -> None:
    run_ranks(_destroyed_after_a_fault, 1, str(tmp_path))


def _no_space(rank: int, world_size: int, folder: str) -> str:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))  # a page: masters fit, state does not
    with pytest.raises(FileIoError) as failure:
        _engine(_nvme(folder), stage=2)
    return str(failure.value)


def test_space_that_one_rank_lacks_is_an_error_on_all_ranks_before_training(tmp_path: Path) -> None:
    texts = run_ranks(_no_space, 2, str(tmp_path))
    assert texts[0].startswith("rank 1 ")
    assert all("/states" in text for text in texts)
    assert texts[0] == texts[1]


# -- what is refused before work --------------------------------------------------------------------------------------


def _refused(offload: dict[str, Any], make: Callable[[nn.Module], torch.optim.Optimizer] | None, **blocks: Any) -> None:
    model = build(TiedGpt, dtype=torch.float32)
    keys = {"offload_optimizer": offload, **blocks.pop("zero_keys", {})}
    settings = config(**zero(3, **keys), **blocks)
    make_engine(model, settings, **({} if make is None else {"optimizer": make(model)}))


def _run_refused(rank: int, world_size: int, *arguments: Any) -> None:
    offload, kind, blocks = arguments
    make = None if kind is None else (lambda model: kind(model.parameters(), lr=1e-3))
    _refused(offload, make, **blocks)


@pytest.mark.parametrize(
    ("keys", "kind", "blocks", "error", "text"),
    [
        ({"buffer_count": 2}, None, {"optimizer": {"type": "Adam"}}, ConfigError, r"buffer_count = 2.*at least 3"),
        ({}, None, {"optimizer": {"type": "Lamb"}}, ArgumentError, 'FusedLamb with .*"nvme".*Use device "cpu"'),
        ({"device": "cpu"}, torch.optim.AdamW, {}, ArgumentError, '"zero_force_ds_cpu_optimizer": false'),
        ({}, torch.optim.AdamW, {}, ArgumentError, '"zero_force_ds_cpu_optimizer": false'),
    ],
)
def test_what_cannot_work_is_refused_with_a_cure(
    keys: dict[str, Any], kind: Any, blocks: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed, match=text) as failure:
        run_ranks(_run_refused, 1, {**_nvme(str(tmp_path)), **keys}, kind, blocks)
    assert error.__name__ in str(failure.value)
    assert list(tmp_path.iterdir()) == []


def _accepted(rank: int, world_size: int, folder: str) -> None:
    free = {"zero_force_ds_cpu_optimizer": False}
    model = build(TiedGpt, dtype=torch.float32)
    for offload in ({"device": "cpu"}, _nvme(folder)):
        settings = config(**zero(2, offload_optimizer=offload), **free)
        engine = make_engine(model, settings, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        train(engine, _batches(world_size, 0, 2), rank)
        engine.destroy()
    lamb = config(**zero(2, offload_optimizer={"device": "cpu"}), optimizer={"type": "Lamb"})
    engine = make_engine(model, lamb)
    assert isinstance(engine.basic_optimizer, FusedLamb)
    train(engine, _batches(world_size, 0, 2), rank)


def test_other_optimizers_train_where_they_can(tmp_path: Path) -> None:
    run_ranks(_accepted, 1, str(tmp_path))
