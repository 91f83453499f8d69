"""Faults that users of systems like this one met, each as the behaviour that is right, at every ZeRO stage it concerns.

Here are those that no other file states. Elsewhere: several backward calls, parameters used on one rank only, recomputation,
`inference_mode`, two engines in one loss (`test_zero_situations`); stages that agree, tied weights (`test_parity_stages`);
another number of ranks (`test_resume`); weights set after `zero.Init` (`test_zero_init`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.checkpoint import read_optimizer_state
from deepspeed.errors import CheckpointError, CommError, UsageError
from deepspeed.pipe import PipelineModule
from tests.support.engines import config, make_engine, masters, model_weights, train, zero
from tests.support.models import Mlp, PartlyFrozen, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STAGES = (0, 1, 2, 3)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _blocks(stage: int, **others: Any) -> dict[str, Any]:
    """Several buckets, and nothing that stays gathered, although models are tiny."""
    return {**zero(stage, reduce_bucket_size=50, stage3_param_persistence_threshold=0), **others}


def _engines(model_class: Any = Mlp, seed: int = 0, optimizer: Any = ADAM, **others: Any) -> Iterator[tuple[int, Any]]:
    """(stage, engine) for every stage, one after the other."""
    for stage in STAGES:
        model = build(model_class, dtype=torch.float64, seed=seed)
        trained = optimizer([p for p in model.parameters() if p.requires_grad])
        engine = make_engine(model, config(**_blocks(stage, **others)), optimizer=trained)
        yield stage, engine
        engine.destroy()


def _batches(steps: int, world_size: int, micro_batches: int = 1) -> Any:
    return make_batches(build(Mlp, dtype=torch.float64), steps, micro_batches, world_size)


# -- gradients --------------------------------------------------------------------------------------------------------


class WithSideLoss(nn.Module):
    """The loss is made of the whole model's output and of a direct call of one of its modules."""

    def __init__(self, model: Any, first: nn.Module) -> None:
        super().__init__()
        self.model, self._first = model, [first]  # in a list: a module of `model` already

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        whole: Tensor = self.model(inputs, targets)
        beside: Tensor = self._first[0](inputs)
        return whole + beside.square().mean()


def _side_loss(rank: int, world_size: int) -> None:
    batches = _batches(2, world_size, 2)
    plain: Any = build(Mlp, dtype=torch.float64)
    wanted = train_reference(WithSideLoss(plain, plain.first), SGD, batches).weights
    for stage in STAGES:
        model = build(Mlp, dtype=torch.float64)
        engine = make_engine(model, config(2, **_blocks(stage)), optimizer=SGD(model.parameters()))
        both = WithSideLoss(engine, model.first)
        for step in batches:
            for micro in step:
                engine.backward(both(*micro[rank]))
                engine.step()
        got = {f"model.{name}": value for name, value in masters(engine).items()}
        assert relative_difference(got, wanted) <= FP64_ROUNDING, stage
        engine.destroy()


def test_a_module_called_beside_the_engine_adds_its_part_of_the_gradient() -> None:
    run_ranks(_side_loss, 2)


def _overflow(rank: int, world_size: int, precision: dict[str, Any]) -> None:
    for stage in STAGES:
        model = build(Mlp)
        engine = make_engine(model, config(**_blocks(stage, **precision)), optimizer=ADAM(model.parameters()))
        dtype = model.first.weight.dtype
        batches = make_batches(build(Mlp), 3, 1, world_size)
        before = masters(engine)
        for number, step in enumerate(batches):
            loss = engine(*(t.to(dtype) for t in step[0][rank])).float()
            engine.backward(loss * (float("inf") if (rank, number) == (1, 1) else 1.0))
            engine.step()
            after = masters(engine)
            assert engine.was_step_applied() == (number != 1), stage
            assert (relative_difference(after, before) == 0.0) == (number == 1), stage
            before = after
        assert engine.skipped_steps == 1, stage
        assert all(bool(value.isfinite().all()) for value in before.values())
        engine.destroy()


@pytest.mark.parametrize(
    "precision", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}], ids=str
)
def test_an_infinity_on_one_rank_skips_one_step_on_all(precision: dict[str, Any]) -> None:
    run_ranks(_overflow, 3, precision)


class CallsItsHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.body(x)
        for _ in range(times):
            x = self.head(x)
        return x.square().mean()


def _different_calls(rank: int, world_size: int) -> str:
    """Either it works, or the error names the module on every rank."""
    model = CallsItsHead()
    settings = config(**_blocks(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0}))
    engine = make_engine(model, settings, optimizer=SGD(model.parameters()))
    try:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8), 1 + 2 * rank))
            engine.step()
    except CommError as error:
        return str(error)
    return "head: no error"


def test_ranks_that_call_a_module_differently_train_or_are_told_which_module() -> None:
    assert all("head" in text for text in run_ranks(_different_calls, 2, timeout_seconds=40))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _frozen(rank: int, world_size: int, folder: str) -> None:
    for stage, engine in _engines(PartlyFrozen):
        train(engine, _batches(1, world_size), rank)
        engine.save_checkpoint(f"{folder}/{stage}", tag="t")
        saved = model_weights(engine)
        model = build(PartlyFrozen, dtype=torch.float64, seed=5)
        optimizer = ADAM([p for p in model.parameters() if p.requires_grad])
        other = make_engine(model, config(**_blocks(stage)), optimizer=optimizer)
        assert relative_difference(model_weights(other), saved) > 0
        other.load_checkpoint(f"{folder}/{stage}", tag="t")
        assert relative_difference(model_weights(other), saved) == 0.0, stage
        other.destroy()


def test_frozen_weights_come_back(tmp_path: Path) -> None:
    run_ranks(_frozen, 2, str(tmp_path))


def _resave(rank: int, world_size: int, folder: str) -> None:
    batches = _batches(4, world_size)
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3, "total_num_steps": 12}}
    wanted = {}
    for stage, engine in _engines(scheduler=schedule):
        train(engine, batches[:2], rank)
        engine.save_checkpoint(f"{folder}/first{stage}", tag="t")
        wanted[stage] = (train(engine, batches[2:], rank).weights, engine.get_lr())
    for stage, engine in _engines(seed=3, scheduler=schedule):
        engine.load_checkpoint(f"{folder}/first{stage}", tag="t")
        engine.save_checkpoint(f"{folder}/second{stage}", tag="t")
    for stage, engine in _engines(seed=4, scheduler=schedule):
        engine.load_checkpoint(f"{folder}/second{stage}", tag="t")
        weights = train(engine, batches[2:], rank).weights
        assert relative_difference(weights, wanted[stage][0]) == 0.0, stage
        assert engine.get_lr() == wanted[stage][1], stage


def test_loaded_and_saved_at_once_nothing_changes_and_the_rate_goes_on(tmp_path: Path) -> None:
    run_ranks(_resave, 2, str(tmp_path))


def _moments(rank: int, world_size: int, folder: str) -> None:
    batches = _batches(3, world_size)
    wanted = train_reference(build(Mlp, dtype=torch.float64), ADAM, batches).state
    for stage, engine in _engines():
        train(engine, batches, rank)
        engine.save_checkpoint(f"{folder}/{stage}", tag="t")
        found = read_optimizer_state(f"{folder}/{stage}", tag="t")
        for key in ("exp_avg", "exp_avg_sq"):
            got = {name: each[key] for name, each in found.items()}
            assert relative_difference(got, {name: each[key] for name, each in wanted.items()}) <= FP64_ROUNDING, stage


def test_moments_are_read_from_disk_by_parameter_name(tmp_path: Path) -> None:
    run_ranks(_moments, 2, str(tmp_path))


def _damaged(rank: int, world_size: int, folder: str) -> None:
    for stage, engine in _engines():
        train(engine, _batches(1, world_size), rank)
        before = masters(engine)
        for number, harm in enumerate((_cut, _flip)):
            where = f"{folder}/{stage}.{number}"
            engine.save_checkpoint(where, tag="t")
            torch.distributed.barrier()
            files = [path for path in Path(where, "t").rglob("*") if path.is_file()]
            victim = max(files, key=lambda path: (path.stat().st_size, path.name))
            torch.distributed.barrier()
            if rank == 0:
                victim.write_bytes(harm(victim.read_bytes()))
            torch.distributed.barrier()
            with pytest.raises(CheckpointError, match=victim.name):  # on every rank
                engine.load_checkpoint(where)
            assert relative_difference(masters(engine), before) == 0.0


def _cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :]


def test_a_damaged_file_is_named_on_every_rank_and_nothing_is_loaded(tmp_path: Path) -> None:
    run_ranks(_damaged, 2, str(tmp_path))


def _left_over(rank: int, world_size: int, folder: str) -> None:
    for stage, engine in _engines():
        if rank == 0:
            Path(folder, str(stage), "t", "optim").mkdir(parents=True)
            Path(folder, str(stage), "t", "mp_rank_00_model_states.pt").write_bytes(b"half")
        torch.distributed.barrier()
        engine.save_checkpoint(f"{folder}/{stage}", tag="t")
        saved = masters(engine)
        train(engine, _batches(1, world_size), rank)
        engine.load_checkpoint(f"{folder}/{stage}", tag="t")
        assert relative_difference(masters(engine), saved) == 0.0


def test_a_half_written_folder_of_the_same_tag_does_not_stand_in_the_way(tmp_path: Path) -> None:
    run_ranks(_left_over, 2, str(tmp_path))


def _sixteen_bit_model(rank: int, world_size: int, folder: str) -> None:
    for gathers in (True, False):
        model = build(Mlp)
        blocks = _blocks(3, bf16={"enabled": True})
        blocks["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gathers
        engine = make_engine(model, config(**blocks), optimizer=ADAM(model.parameters()))
        wanted = model_weights(engine)
        if not gathers:
            with pytest.raises(UsageError, match="gather_16bit_weights_on_model_save"):
                engine.save_16bit_model(f"{folder}/off", "m.bin")
        else:
            assert engine.save_16bit_model(f"{folder}/on", "m.bin")
            saved = torch.load(f"{folder}/on/m.bin", weights_only=True)
            assert relative_difference(saved, wanted) == 0.0
            assert {value.dtype for value in saved.values()} == {torch.bfloat16}
        engine.destroy()


def test_a_sixteen_bit_model_is_saved_whole_or_not_without_a_word(tmp_path: Path) -> None:
    run_ranks(_sixteen_bit_model, 2, str(tmp_path))


def _compiled(rank: int, world_size: int, folder: str) -> None:
    for stage, engine in _engines():
        engine.compile(backend="eager")
        saved = train(engine, _batches(1, world_size), rank).weights
        assert set(saved) == set(dict(build(Mlp).named_parameters()))
        engine.save_checkpoint(f"{folder}/{stage}", tag="t")
        model = build(Mlp, dtype=torch.float64, seed=5)
        other = make_engine(model, config(**_blocks(stage)), optimizer=ADAM(model.parameters()))
        other.load_checkpoint(f"{folder}/{stage}", tag="t")
        assert relative_difference(masters(other), saved) == 0.0, stage
        other.destroy()


def test_a_compiled_engine_saves_plain_names_that_any_engine_loads(tmp_path: Path) -> None:
    run_ranks(_compiled, 2, str(tmp_path), timeout_seconds=120)


# -- pipelines --------------------------------------------------------------------------------------------------------


def _square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _pipeline_cases(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
    plain = nn.Sequential(*copy.deepcopy(layers))
    net = PipelineModule(layers=layers, num_stages=2, loss_fn=_square, partition_method="uniform")
    settings = config(3, zero_allow_untested_optimizer=True)
    engine = make_engine(net, settings, optimizer=torch.optim.SGD(list(net.parameters()), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for lengths in ((5, 5, 5), (9, 9, 9), (3, 7, 4)):
        data = [(torch.randn(4, length, 8), torch.randn(4, length, 8)) for length in lengths]
        loss = engine.train_batch(data_iter=iter(data))
        wanted = torch.stack([_square(plain(inputs), targets) for inputs, targets in data]).mean()
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(loss, wanted.detach())
    for name, param in engine.module.named_parameters():
        torch.testing.assert_close(param.detach(), plain.get_parameter(name).detach())
    with pytest.raises(StopIteration, match="ended after 2 of 3 micro-batches"):
        engine.train_batch(data_iter=iter(data[:2]))


def test_a_pipeline_averages_micro_batches_of_any_length_and_ends_with_its_data() -> None:
    run_ranks(_pipeline_cases, 2)
