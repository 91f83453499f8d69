"""`ratio` and `super_offload`: two threads make one update, with the bits of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.ops.optimizer import GroupOptimizer
from tests.support.engines import config, make_engine, masters, model_weights, moments, train, zero
from tests.support.models import Mlp, TiedGpt, TinyModel, build, cast_batches, make_batches
from tests.support.ranks import RanksFailed, run_ranks

STEPS = 5
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
THREAD = "optimizer step"
CASES = [
    (3, {"ratio": 0.5}),
    (3, {"ratio": 0.0}),
    (3, {"super_offload": True}),
    (2, {"super_offload": True, "cpuadam_cores_perc": 0.5}),
    (1, {"super_offload": True}),
]


def engine_with(
    stage: int,
    offload: dict[str, Any] | None,
    model: type[TinyModel],
    dtype: torch.dtype,
    parameter_files: str | None = None,
    **blocks: Any,
) -> DeepSpeedEngine:
    is_bf16 = dtype == torch.bfloat16
    block: dict[str, Any] = {} if offload is None else {"offload_optimizer": {"device": "cpu", **offload}}
    if parameter_files is not None:
        block["offload_param"] = {"device": "nvme", "nvme_path": parameter_files, "max_in_cpu": 0}
    keys = {"sub_group_size": 40, "stage3_param_persistence_threshold": 30, "reduce_bucket_size": 150}
    blocks = {**zero(stage, **keys, **block), "optimizer": ADAM, "bf16": {"enabled": is_bf16}, **blocks}
    return make_engine(build(model, dtype=torch.float32 if is_bf16 else dtype), config(2, **blocks))


@contextmanager
def steppers() -> Iterator[set[str]]:
    """Names of the threads that make one-pass steps inside."""
    seen: set[str] = set()
    plain = GroupOptimizer.step_in_one_pass

    def step(self: GroupOptimizer, updates: Any, factor: float) -> None:
        if updates:
            seen.add(threading.current_thread().name)
        plain(self, updates, factor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupOptimizer, "step_in_one_pass", step)
        yield seen


def _compare(rank: int, world_size: int) -> tuple[list[str], list[set[str]]]:
    wrong, threads = [], []
    for model in (Mlp, TiedGpt):
        for dtype in (torch.float32, torch.bfloat16):
            batches = cast_batches(make_batches(build(model, dtype=torch.float32), STEPS, 2, world_size), dtype)
            for stage, offload in CASES:
                found: list[dict[str, Tensor]] = []
                for block in (None, {}, offload):
                    engine = engine_with(stage, block, model, dtype, gradient_clipping=0.3)
                    with steppers() as seen:
                        train(engine, batches, rank)
                    found.append(_everything(engine))
                    engine.destroy()
                threads.append(seen)
                if not all(torch.equal(found[0][name], each[name]) for each in found[1:] for name in found[0]):
                    wrong.append(f"{model.__name__} {dtype} stage {stage} {offload}")
    return wrong, threads


def _everything(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    found = {f"master {name}": value for name, value in masters(engine).items()}
    found |= {f"weight {name}": value for name, value in model_weights(engine).items()}
    return found | {f"{key} {name}": value for name, state in moments(engine).items() for key, value in state.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_threads_give_the_bits_of_one(world_size: int) -> None:
    for wrong, threads in run_ranks(_compare, world_size, timeout_seconds=240):
        assert wrong == []
        for (_, offload), seen in zip(CASES * 4, threads, strict=True):
            expected = {THREAD} if offload.get("super_offload") else {"MainThread"} if offload["ratio"] == 0.0 else None
            assert seen == (expected or {THREAD, "MainThread"}), offload


def _compare_with_parameters_in_files(rank: int, world_size: int, folder: str) -> list[str]:
    wrong: list[str] = []
    plain: dict[str, Tensor] = {}
    batches = cast_batches(make_batches(build(TiedGpt), STEPS, 2, world_size), torch.bfloat16)
    for offload in (None, {"ratio": 0.5}, {"ratio": 0.9}, {"super_offload": True}):
        engine = engine_with(3, offload, TiedGpt, torch.bfloat16, None if offload is None else folder)
        train(engine, batches, rank)
        found = _everything(engine)
        engine.destroy()
        plain = plain or found  # the first one has nothing offloaded
        wrong += [f"{offload}: {name}" for name in plain if not torch.equal(plain[name], found[name])]
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_threads_may_write_one_file_of_parameters(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(_compare_with_parameters_in_files, world_size, str(tmp_path)) == [[]] * world_size


def _meet(rank: int, world_size: int) -> bool:
    """Both parts of an update must be under way at once: each waits for the other to have begun."""
    meeting = threading.Barrier(2, timeout=20)
    plain = GroupOptimizer.step_in_one_pass
    met = set()

    def step(self: GroupOptimizer, updates: Any, factor: float) -> None:
        name = threading.current_thread().name
        if name not in met:
            met.add(name)
            meeting.wait()
        plain(self, updates, factor)

    engine = engine_with(3, {"ratio": 0.5}, Mlp, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupOptimizer, "step_in_one_pass", step)
        train(engine, cast_batches(make_batches(build(Mlp), 1, 2, world_size), torch.bfloat16), rank)
    engine.destroy()
    return met == {THREAD, "MainThread"}


def test_both_parts_are_stepped_at_once() -> None:
    assert run_ranks(_meet, 1) == [True]


def _gather_while_stepping(rank: int, world_size: int) -> list[str]:
    """What happens in which order, where the thread is held until the first group has been published."""
    engine = engine_with(2, {"super_offload": True}, Mlp, torch.float32)
    flats = engine.optimizer.master.flats
    assert len(flats) == 1
    engine.destroy()
    engine = engine_with(3, {"super_offload": True}, Mlp, torch.float32)
    first, second = engine.optimizer.master.flats
    journal: list[str] = []
    published = threading.Event()
    plain_step, plain_publish = GroupOptimizer.step_in_one_pass, first.gatherer.publish

    def step(self: GroupOptimizer, updates: Any, factor: float) -> None:
        is_first = updates[0].param in {s.param for s in engine.optimizer.master.slices if s.flat is first}
        if not is_first:
            assert published.wait(20), "the first group was not published while the second had yet to be stepped"
        plain_step(self, updates, factor)
        journal.append("first stepped" if is_first else "second stepped")

    def publish() -> None:
        plain_publish()
        journal.append("first published")
        published.set()

    batches = make_batches(build(Mlp), 1, 2, world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupOptimizer, "step_in_one_pass", step)
        patch.setattr(first.gatherer, "publish", publish)
        train(engine, batches, rank)
    assert second.layout.numel > 0
    engine.destroy()
    return journal


def test_a_group_is_published_while_the_next_is_stepped() -> None:
    for journal in run_ranks(_gather_while_stepping, 2):
        assert journal[:3] == ["first stepped", "first published", "second stepped"]


def _break(rank: int, world_size: int) -> None:
    engine = engine_with(3, {"super_offload": True}, Mlp, torch.float32)

    def step(self: GroupOptimizer, updates: Any, factor: float) -> None:
        raise MemoryError("no room for state")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupOptimizer, "step_in_one_pass", step)
        train(engine, make_batches(build(Mlp), 1, 2, world_size), rank)


def test_an_error_of_the_thread_is_the_steps_own() -> None:
    with pytest.raises(RanksFailed, match="no room for state"):
        run_ranks(_break, 2)


def test_a_destroyed_engine_leaves_no_thread() -> None:
    engine = engine_with(3, {"super_offload": True}, Mlp, torch.float32)
    train(engine, make_batches(build(Mlp), 1, 2, 1), 0)
    assert THREAD in [thread.name for thread in threading.enumerate()]
    engine.destroy()
    assert THREAD not in [thread.name for thread in threading.enumerate()]
