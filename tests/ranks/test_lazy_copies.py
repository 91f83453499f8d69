"""A background save copies masters and moments while the next forward and backward run, and what changes them waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.checkpoint import open_checkpoint
from deepspeed.checkpoint.save import snapshot
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.errors import CheckpointError
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from tests.ranks.test_async_save import _batches, _contents, _engine
from tests.support.engines import train
from tests.support.ranks import run_ranks

OPEN_AFTER_SECONDS = 0.3


@contextmanager
def _held_back(gate: threading.Event) -> Iterator[None]:
    """Private pieces are copied when the gate opens."""
    copy = snapshot._copy_private

    def late(*moves: Any) -> None:
        assert gate.wait(30)
        copy(*moves)

    with mock.patch.object(snapshot, "_copy_private", late):
        yield


def _save_and(change: Callable[[DeepSpeedEngine, Any, int], object], rank: int, ranks: int, folder: str, *run: Any) -> None:
    """Save at once, save behind with a copy that is late, change the state: both must hold the state before."""
    stage, kind = run
    engine = _engine(ranks, stage, kind, async_save=True)
    data = _batches(engine, ranks, torch.bfloat16 if kind == "bf16" else torch.float32)
    train(engine, data[:2], rank)
    engine.save_checkpoint(folder, tag="at once")
    engine.wait_for_checkpoint()
    gate = threading.Event()
    with _held_back(gate):
        engine.save_checkpoint(folder, tag="behind")
        opener = threading.Timer(OPEN_AFTER_SECONDS, gate.set)
        opener.start()
        change(engine, data, rank)
        engine.wait_for_checkpoint()
        opener.join()
    wanted, found = (_contents(folder, tag, ranks) for tag in ("at once", "behind"))
    assert len(wanted[1]) > 10
    assert wanted[0] == found[0]
    assert all(torch.equal(one, other) for one, other in zip(wanted[1], found[1], strict=True))
    engine.save_checkpoint(folder, tag="after")
    engine.wait_for_checkpoint()
    changed = _contents(folder, "after", ranks)[1]
    assert not all(torch.equal(one, other) for one, other in zip(wanted[1], changed, strict=True)), "nothing was changed"
    engine.destroy()


def _train_on(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    train(engine, data[2:], rank)


def _set_master(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    for param in engine.module.parameters():
        safe_set_full_fp32_param(param, torch.full(_shape(param), 0.25))


def _set_own_master(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    for param in engine.module.parameters():
        own = safe_get_local_fp32_param(param)
        assert own is not None
        safe_set_local_fp32_param(param, torch.full_like(own, 0.25))


def _set_moment(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    for param in engine.module.parameters():
        safe_set_full_optimizer_state(param, torch.full(_shape(param), 0.25), "exp_avg")


def _edit_state(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    assert engine.optimizer is not None
    for state in engine.optimizer.state.values():
        state["exp_avg"].zero_()


def _load_state(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    assert engine.optimizer is not None
    found = engine.optimizer.state_dict()
    for state in found["optimizer"]["state"].values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    engine.optimizer.load_state_dict(found)


def _write_masters(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        for param in group["params"]:
            param.data.fill_(0.25)  # no count of writes tells of it


def _write_masters_of_the_torch_optimizer(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    for group in engine.client_optimizer.param_groups:
        for number in range(len(group["params"])):
            group["params"][number].data.fill_(0.25)


def _write_moments_of_a_state_dict(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    assert engine.optimizer is not None
    for state in engine.optimizer.state_dict()["optimizer"]["state"].values():
        state["exp_avg"].data.zero_()


def _load_module(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    engine.load_module_state_dict(
        {name: torch.full(_shape(param), 0.25, dtype=param.dtype) for name, param in engine.module.named_parameters()}
    )


def _load_module_by_hand(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    def fill(src: object, dst: torch.nn.Module) -> None:
        for param in dst.parameters():
            param.data.fill_(0.25)

    engine.load_module_state_dict({}, custom_load_fn=fill)


def _shape(param: torch.nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _edit_and_read(engine: DeepSpeedEngine, data: Any, rank: int) -> None:
    for param in engine.module.parameters():
        with torch.no_grad():
            param.fill_(0.25)
        assert safe_get_full_fp32_param(param) is not None  # takes the edit over into the master


@pytest.mark.parametrize(
    ("world_size", "stage", "kind"), [(1, 0, "bf16"), (2, 1, "fp32"), (2, 2, "bf16"), (3, 3, "bf16"), (2, 3, "fp32")]
)
def test_an_update_waits_until_masters_and_moments_are_copied(
    tmp_path: Path, world_size: int, stage: int, kind: str
) -> None:
    run_ranks(_update_after_a_save, world_size, str(tmp_path), stage, kind)


def _update_after_a_save(rank: int, world_size: int, folder: str, stage: int, kind: str) -> None:
    _save_and(_train_on, rank, world_size, folder, stage, kind)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "change",
    [
        *(_set_master, _set_own_master, _set_moment, _edit_state, _load_state, _load_module, _load_module_by_hand),
        *(_write_masters, _write_masters_of_the_torch_optimizer, _write_moments_of_a_state_dict),
    ],
)
def test_calls_that_change_masters_or_moments_wait_for_the_copy(tmp_path: Path, stage: int, change: Any) -> None:
    run_ranks(_change_after_a_save, 2, str(tmp_path), stage, change)


def _load_what_is_there(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, 3, "bf16", async_save=True)
    train(engine, _batches(engine, world_size, torch.bfloat16)[:1], rank)
    gate = threading.Event()
    with _held_back(gate):
        engine.save_checkpoint(folder, tag="t")
        threading.Timer(OPEN_AFTER_SECONDS, gate.set).start()
        engine.load_module_state_dict({}, strict=False)
        engine.wait_for_checkpoint()
    engine.destroy()


def test_a_load_of_weights_that_changes_none_does_not_fail_the_save(tmp_path: Path) -> None:
    run_ranks(_load_what_is_there, 2, str(tmp_path))
    assert open_checkpoint(tmp_path).tag == "t"


def test_taking_over_what_the_caller_wrote_into_weights_waits_for_the_copy(tmp_path: Path) -> None:
    run_ranks(_change_after_a_save, 2, str(tmp_path), 1, _edit_and_read)


def _change_after_a_save(rank: int, world_size: int, folder: str, stage: int, change: Any) -> None:
    _save_and(change, rank, world_size, folder, stage, "bf16")


def _compute_during_the_copy(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, 2, "bf16", async_save=True)
    data = _batches(engine, world_size, torch.bfloat16)
    train(engine, data[:1], rank)
    gate = threading.Event()
    with _held_back(gate):
        engine.save_checkpoint(folder, tag="t")
        inputs, targets = data[1][0][rank]
        engine.backward(engine(inputs, targets))
        assert engine._parts.checkpointing.saver.is_writing
        assert not Path(folder, "t").exists()
        gate.set()
        engine.step()
        engine.wait_for_checkpoint()
    assert Path(folder, "t", "manifest.json").exists()
    engine.destroy()


def test_forward_and_backward_run_before_masters_and_moments_are_copied(tmp_path: Path) -> None:
    run_ranks(_compute_during_the_copy, 2, str(tmp_path))


def _write_through_a_kept_reference(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(world_size, 1, "bf16", async_save=True)
    data = _batches(engine, world_size, torch.bfloat16)
    train(engine, data[:1], rank)
    assert engine.optimizer is not None
    kept = [state["exp_avg"] for state in engine.optimizer.state.values()]
    engine.save_checkpoint(folder, tag="t", client_state={"number": 1})
    engine.wait_for_checkpoint()
    gate = threading.Event()
    with _held_back(gate):
        engine.save_checkpoint(folder, tag="t", client_state={"number": 2})
        for moment in kept if rank == 1 else ():
            moment.add_(1)
        gate.set()
        with pytest.raises(
            CheckpointError, match=r"exp_avg.* changed while a background save copied them.*wait_for_checkpoint"
        ):
            engine.wait_for_checkpoint()
    engine.save_checkpoint(folder, tag="later", client_state={"number": 3})
    engine.destroy()


def test_state_written_through_a_kept_reference_is_refused_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    run_ranks(_write_through_a_kept_reference, 2, str(tmp_path))
    assert open_checkpoint(tmp_path, "t").client_state() == {"number": 1}
    assert open_checkpoint(tmp_path, "later").client_state() == {"number": 3}
