"""Keys of `zero_optimization` do what the reference says: each test fails when its key is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint import read_optimizer_state
from deepspeed.comm.recorder import RECORDER
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.zero.gradients import ShardedGradients
from tests.support.engines import config, make_engine, masters, zero
from tests.support.models import Mlp, WithUnusedParameter, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

LOG: dict[str, Any] = {"comms_logger": {"enabled": True, "prof_all": True}}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _step(engine: Any, batches: Any, rank: int) -> None:
    for micro_batch in batches:
        engine.backward(engine(*micro_batch[rank]))
        engine.step()


def _calls_per_step(rank: int, world_size: int, keys: dict[str, Any]) -> dict[str, int]:
    """Collectives of the third step, by name."""
    model = build(Mlp)
    batches = make_batches(model, 3, 1, world_size)
    engine = make_engine(model, config(**zero(**keys), **LOG), optimizer=_sgd(model))
    for step in batches[:2]:
        _step(engine, step, rank)
    RECORDER.reset()
    _step(engine, batches[2], rank)
    return {name: sum(count for count, *_ in sizes.values()) for name, sizes in RECORDER.comms_dict.items()}


def _calls(world_size: int = 2, **keys: Any) -> dict[str, int]:
    found: dict[str, int] = run_ranks(_calls_per_step, world_size, keys)[0]
    return found


def test_reduce_bucket_size_decides_how_many_reductions_there_are() -> None:
    assert _calls(stage=1)["reduce_scatter_tensor"] == 1
    parameters = len(list(build(Mlp).parameters()))
    assert _calls(stage=1, reduce_bucket_size=1)["reduce_scatter_tensor"] == parameters


def test_allgather_bucket_size_decides_how_many_gathers_there_are_after_the_update() -> None:
    assert _calls(stage=2)["all_gather_into_tensor"] == 1
    assert _calls(stage=2, allgather_bucket_size=1)["all_gather_into_tensor"] == len(list(build(Mlp).parameters()))


def test_reduce_scatter_false_reduces_whole_buckets_on_every_rank() -> None:
    scattered, whole = _calls(stage=2), _calls(stage=2, reduce_scatter=False)
    assert "reduce_scatter_tensor" in scattered
    assert "reduce_scatter_tensor" not in whole
    assert whole["all_reduce"] == scattered.get("all_reduce", 0) + scattered["reduce_scatter_tensor"]


def test_use_multi_rank_bucket_allreduce_false_reduces_each_ranks_share_by_itself() -> None:
    together = _calls(stage=1, reduce_scatter=False)["all_reduce"]
    apart = _calls(stage=1, reduce_scatter=False, use_multi_rank_bucket_allreduce=False)["all_reduce"]
    assert apart == together + 1  # one bucket, two ranks


def _weights_with(rank: int, world_size: int, keys: dict[str, Any]) -> float:
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, 4, 2, world_size)
    reference = train_reference(build(Mlp, dtype=torch.float64), lambda p: torch.optim.SGD(p, lr=0.1), batches)
    engine = make_engine(model, config(2, **zero(**keys)), optimizer=_sgd(model))
    for step in batches:
        _step(engine, step, rank)
    return relative_difference(masters(engine), reference.weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "keys",
    [
        {"reduce_scatter": False},
        {"reduce_scatter": False, "use_multi_rank_bucket_allreduce": False},
        {"overlap_comm": False, "reduce_bucket_size": 20},
        {"contiguous_gradients": False, "round_robin_gradients": True, "allgather_partitions": False},
    ],
    ids=str,
)
def test_no_key_changes_the_numbers(stage: int, keys: dict[str, Any]) -> None:
    both = {"stage": stage, "stage3_param_persistence_threshold": 0, **keys}
    assert max(run_ranks(_weights_with, 3, both)) <= FP64_ROUNDING


def _waits_within_backward(rank: int, world_size: int, keys: dict[str, Any]) -> list[bool]:
    """For each bucket of the second backward: was it waited for before the next one was launched?"""
    model = build(Mlp)
    batches = make_batches(model, 2, 1, world_size)
    engine = make_engine(model, config(**zero(2, reduce_bucket_size=20, **keys)), optimizer=_sgd(model))
    _step(engine, batches[0], rank)
    store = engine._parts.partition.trained[0].gradients
    assert isinstance(store, ShardedGradients)
    events: list[str] = []
    launch, wait = store.launch, store.wait
    store.launch = lambda number: (events.append("launch"), launch(number))[1]  # type: ignore[method-assign, func-returns-value]
    store.wait = lambda number: (events.append("wait"), wait(number))[1]  # type: ignore[method-assign, func-returns-value]
    _step(engine, batches[1], rank)
    launches = [position for position, event in enumerate(events) if event == "launch"]
    return [events[position + 1] == "wait" for position in launches[:-1]]


def test_overlap_comm_false_waits_for_each_bucket_before_the_next() -> None:
    assert all(run_ranks(_waits_within_backward, 2, {"overlap_comm": False})[0])
    assert not any(run_ranks(_waits_within_backward, 2, {})[0])


def _unused(rank: int, world_size: int, stage: int) -> str:
    model = build(WithUnusedParameter)
    batches = make_batches(model, 1, 1, world_size)
    engine = make_engine(model, config(**zero(stage, ignore_unused_parameters=False)), optimizer=_sgd(model))
    with pytest.raises(UsageError, match="ignore_unused_parameters is false") as raised:
        _step(engine, batches[0], rank)
    return str(raised.value)


@pytest.mark.parametrize("stage", [1, 2])
def test_ignore_unused_parameters_false_makes_them_an_error_on_every_rank(stage: int) -> None:
    assert len(run_ranks(_unused, 2, stage)) == 2


def _unused_once(rank: int, world_size: int, stage: int) -> str:
    class Skipping(Mlp):
        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return super().forward(inputs, targets) if self.training else self.first(inputs).sum()

    model = build(Skipping)
    batches = make_batches(model, 2, 1, world_size)
    keys = {"ignore_unused_parameters": False, "reduce_bucket_size": 20}
    engine = make_engine(model, config(**zero(stage, **keys)), optimizer=_sgd(model))
    _step(engine, batches[0], rank)  # from now on buckets leave while backward runs
    model.train(rank == 0)
    with pytest.raises(UsageError, match="ignore_unused_parameters is false") as raised:
        _step(engine, batches[1], rank)
    return str(raised.value)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_one_rank_alone_does_not_use_are_an_error_on_every_rank(stage: int) -> None:
    other, text = run_ranks(_unused_once, 2, stage)
    assert "0 of 4 parameters" in other
    assert "2 of 4 parameters have no gradient since the last update on this rank: 'second." in text


def _norm(rank: int, world_size: int, stage: int) -> tuple[float | None, bool, bool]:
    model = build(Mlp)
    batches = make_batches(model, 2, 1, world_size)
    engine = make_engine(model, config(**zero(stage, compute_grad_norm=False)), optimizer=_sgd(model))
    _step(engine, batches[0], rank)
    applied = engine.was_step_applied()
    loss = engine(*batches[1][0][rank])
    engine.backward(loss * (float("inf") if rank == 0 else 1.0))
    engine.step()
    return engine.get_global_grad_norm(), applied, engine.was_step_applied()


@pytest.mark.parametrize("stage", [1, 2])
def test_without_the_norm_non_finite_gradients_are_skipped_all_the_same(stage: int) -> None:
    assert run_ranks(_norm, 2, stage) == [(None, True, False)] * 2


def _whole_model(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    model = build(Mlp)
    expected = {name: value.clone().bfloat16() for name, value in model.state_dict().items()}
    keys: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    block: dict[str, Any] = {"bf16": {"enabled": True}}
    engine = make_engine(model, config(**zero(**keys), **block), optimizer=_sgd(model))
    with pytest.raises(ArgumentError, match="stage3_gather_16bit_weights_on_model_save"):
        engine.save_16bit_model(folder, "refused.bin")
    engine.destroy()
    keys["stage3_gather_16bit_weights_on_model_save"] = True
    engine = make_engine(model, config(**zero(**keys), **block), optimizer=_sgd(model))
    assert engine.save_16bit_model(folder)
    saved = torch.load(Path(folder, "pytorch_model.bin"), weights_only=True)
    return {
        "refused": Path(folder, "refused.bin").exists(),
        "same": all(torch.equal(saved[name], value) for name, value in expected.items()) and saved.keys() == expected.keys(),
    }


def test_a_whole_model_leaves_stage_3_only_when_the_config_allows_to_gather_it(tmp_path: Path) -> None:
    assert run_ranks(_whole_model, 2, str(tmp_path)) == [{"refused": False, "same": True}] * 2


def _save_for_moments(rank: int, world_size: int, folder: str, stage: int) -> dict[str, torch.Tensor]:
    model = build(Mlp)
    keys = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = make_engine(model, config(**zero(**keys)), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in make_batches(model, 2, 1, world_size):
        _step(engine, step, rank)
    engine.save_checkpoint(folder, tag="t")
    found = {}
    for name, param in engine.module.named_parameters():
        state = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg")
        assert state is not None
        found[name] = state
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_moments_come_from_disk_by_name_without_an_engine(tmp_path: Path, stage: int) -> None:
    running = run_ranks(_save_for_moments, 3, str(tmp_path), stage)[0]
    stored = read_optimizer_state(tmp_path)
    assert {name: state["step"] for name, state in stored.items()} == dict.fromkeys(running, 2.0)
    for name, exp_avg in running.items():
        assert torch.equal(stored[name]["exp_avg"], exp_avg)


def _rounded_on_load(rank: int, world_size: int, folder: str, from_fp32: bool) -> float:
    model = build(Mlp)
    settings = config(**zero(1, load_from_fp32_weights=from_fp32), bf16={"enabled": True})
    engine = make_engine(model, settings, optimizer=_sgd(model))
    _step(engine, make_batches(engine.module, 1, 1, world_size)[0], rank)
    engine.save_checkpoint(folder, tag=f"{from_fp32}")
    engine.load_checkpoint(folder, tag=f"{from_fp32}")
    return max((value - value.bfloat16().float()).abs().max().item() for value in masters(engine).values())


def test_load_from_fp32_weights_false_starts_masters_from_the_rounded_weights(tmp_path: Path) -> None:
    assert run_ranks(_rounded_on_load, 2, str(tmp_path), False) == [0.0, 0.0]
    assert min(run_ranks(_rounded_on_load, 2, str(tmp_path), True)) > 0.0


def _away_and_back(rank: int, world_size: int) -> float:
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, 2, 1, world_size)
    reference = train_reference(build(Mlp, dtype=torch.float64), lambda p: torch.optim.SGD(p, lr=0.1), batches)
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = make_engine(model, config(**zero(**keys)), optimizer=_sgd(model))
    _step(engine, batches[0], rank)
    assert engine.optimizer is not None
    engine.optimizer.offload_states(include=["optim_states", "lp_params"])
    with pytest.raises(UsageError, match="reload_states"):
        engine(*batches[1][0][rank])
    engine.reload_states()
    engine.empty_partition_cache()
    _step(engine, batches[1], rank)
    return relative_difference(masters(engine), reference.weights)


def test_states_leave_and_come_back_between_steps() -> None:
    assert max(run_ranks(_away_and_back, 2)) <= FP64_ROUNDING


class _Late:
    """A number of a device that is not there before the next step asks for it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value.clone()

    def is_ready(self) -> bool:
        return False

    def get(self) -> float:
        return float(self._value)


def _device_decides(rank: int, world_size: int, is_late: bool) -> tuple[dict[str, Any], list[float], int]:
    """Four steps of which the second brings infinity on rank 1, with a schedule that moves at each made step."""
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, 4, 1, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    settings = config(
        **zero(2, stage3_param_persistence_threshold=0),
        gradient_clipping=0.05,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2, "warmup_type": "linear"}},
    )
    engine = make_engine(model, settings, optimizer=optimizer)
    assert engine.optimizer is not None
    if is_late:
        engine.optimizer.read_late = _Late
    rates = []
    for number, step in enumerate(batches):
        loss = engine(*step[0][rank])
        engine.backward(loss * float("inf") if (number, rank) == (1, 1) else loss)
        engine.step()
        if number != 1:
            rates.append(engine.get_lr()[0])
    return masters(engine), rates, engine.skipped_steps


def test_a_device_that_decides_by_itself_ends_where_the_host_would_have() -> None:
    asked, late = run_ranks(_device_decides, 2, False), run_ranks(_device_decides, 2, True)
    for (weights, rates, skipped), (late_weights, late_rates, late_skipped) in zip(asked, late, strict=True):
        assert skipped == late_skipped == 1
        assert rates == late_rates
        assert relative_difference(late_weights, weights) <= 1e-7  # the clip factor is a 32-bit number on the device
