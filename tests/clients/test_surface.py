"""What clients touch of an engine besides training it: names, kinds and habits that no run of a client shows to hold.

Rows of the table of what real clients call. Each test says whose habit it is; what runs of the clients show is not repeated.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import deepspeed
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.utils import safe_get_full_fp32_param
from tests.support.engines import config, make_engine, masters, model_weights, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.pipelines import layers, make_pipeline, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STAGES = (0, 1, 2, 3)
RATE = 0.1


class Named(Mlp):
    """With what an engine must let through to its model."""

    nickname = "mine"

    def generate(self, length: int) -> list[int]:
        return list(range(length))


def sharding(stage: int) -> dict[str, Any]:
    return zero(stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def wanted(batches: Any) -> dict[str, Tensor]:
    plain = build(Mlp, dtype=torch.float64)
    return train_reference(plain, lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.9), batches).weights


def fit(engine: Any, batches: Any, rank: int) -> Iterator[int]:
    """One step each time it is asked."""
    for step, (micro,) in enumerate(batches):
        engine.backward(engine(*micro[rank]))
        engine.step()
        yield step


# -- the distribution ---------------------------------------------------------------------------------------------------


def test_the_distribution_is_found_by_the_name_that_is_imported() -> None:
    """Accelerate and Transformers look for both before they import."""
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert Version(importlib.metadata.version("deepspeed")) >= Version("0.19.6")


def test_the_launcher_names_the_file_of_environment_variables() -> None:
    """Accelerate appends to it in the current folder."""
    from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME

    assert DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"


# -- initialize ---------------------------------------------------------------------------------------------------------


def _as_lightning_initialises(rank: int, world_size: int, stage: int, device_rank: int | None) -> None:
    model = build(Named, dtype=torch.float64)
    optimizer = sgd(model)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, returned, loader, scheduler = deepspeed.initialize(
        args=argparse.Namespace(device_rank=device_rank),
        config=config(**sharding(stage), zero_allow_untested_optimizer=True),
        model=model,
        model_parameters=filter(lambda param: param.requires_grad, model.parameters()),
        optimizer=optimizer,
        lr_scheduler=schedule,
        dist_init_required=False,
    )
    assert loader is None
    assert returned is engine.optimizer
    assert isinstance(returned, DeepSpeedOptimizer | torch.optim.Optimizer)
    assert scheduler is schedule is engine.lr_scheduler
    engine.lr_scheduler = None  # Lightning steps it itself
    rates = []
    batches = make_batches(model, 3, 1, world_size)
    for _ in fit(engine, batches, rank):
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [RATE] * 3
    assert relative_difference(masters(engine), wanted(batches)) <= FP64_ROUNDING
    scheduler.step()
    assert returned.param_groups[0]["lr"] == RATE / 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_scheduler_that_the_engine_is_told_to_forget_stays_the_clients(stage: int) -> None:
    for device_rank in (None, 0):  # None on a CPU
        run_ranks(_as_lightning_initialises, 2, stage, device_rank)


def _evaluates(rank: int, world_size: int, stage: int) -> None:
    model = build(Mlp, dtype=torch.float64)
    engine, batches = (
        make_engine(model, config(**sharding(stage)), optimizer=sgd(model)),
        make_batches(model, 1, 1, world_size),
    )
    for _ in fit(engine, batches, rank):
        pass
    engine.destroy()
    for module in model.modules():  # what is left of a strategy, before the next one wraps the model
        module._is_full_backward_hook = None
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"):
            getattr(module, kind).clear()
        module._load_state_dict_pre_hooks.clear()
    only_looks = {"train_micro_batch_size_per_gpu": 1, **(sharding(3) if stage == 3 else {})}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=argparse.Namespace(device_rank=None),
        config=only_looks,
        model=model,
        model_parameters=[],
        optimizer=None,
        lr_scheduler=None,
        dist_init_required=False,
    )
    assert (optimizer, scheduler) == (None, None)
    assert any(param.numel() == 0 for param in model.parameters()) is (stage == 3)
    plain = build(Mlp, dtype=torch.float64)
    plain.load_state_dict(wanted(batches))
    engine.eval()
    with torch.no_grad():
        for micro in batches[0]:
            torch.testing.assert_close(engine(*micro[rank]), plain(*micro[rank]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_trained_model_is_wrapped_for_evaluation_after_its_hooks_were_wiped(stage: int) -> None:
    """Lightning's validate, test and predict: no optimizer, an empty list of parameters."""
    run_ranks(_evaluates, 2, stage)


def _hands_auto_on(rank: int, world_size: int) -> None:
    model = build(Mlp, dtype=torch.float64)
    sizes = ("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    auto = dict.fromkeys((*sizes, "reduce_bucket_size", "stage3_param_persistence_threshold"), "auto")
    settings = config(zero_optimization={"stage": 3, **auto}, data_types={"grad_accum_dtype": None})
    engine = make_engine(model, settings, optimizer=sgd(model), args={"local_rank": rank})
    batches = make_batches(model, 2, 1, world_size)
    for _ in fit(engine, batches, rank):
        pass
    assert relative_difference(masters(engine), wanted(batches)) <= FP64_ROUNDING


def test_args_may_be_a_dict_and_sizes_auto_without_a_client_that_fills_them_in() -> None:
    """OpenRLHF."""
    run_ranks(_hands_auto_on, 2)


# -- the engine ---------------------------------------------------------------------------------------------------------


def _answers(rank: int, world_size: int, stage: int) -> None:
    model = build(Named, dtype=torch.float64)
    settings = config(
        zero_optimization={"stage": stage, "stage3_gather_fp16_weights_on_model_save": True}, gradient_clipping=1.0
    )
    engine = make_engine(model, settings, optimizer=sgd(model))
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.module is model
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (rank, rank, world_size)
    assert engine.device == torch.device("cpu")
    assert (engine.nickname, engine.generate(2)) == ("mine", [0, 1])
    assert engine.get_global_grad_norm() is None
    assert engine.config.get("zero_optimization", {}).get("stage") == engine.config["zero_optimization"]["stage"] == stage
    assert engine.zero_gather_16bit_weights_on_model_save() is True
    assert engine.random_ltd_enabled() is False
    assert engine.random_ltd_scheduler is None
    optimizer = engine.optimizer
    assert optimizer is not None
    assert optimizer.overflow is False
    for name in ("global_steps", "micro_steps", "global_samples", "skipped_steps"):  # OpenRLHF and Megatron write them
        setattr(engine, name, 7)
        assert getattr(engine, name) == 7
    batches = make_batches(model, 1, 1, world_size)
    for _ in fit(engine, batches, rank):
        pass
    assert (engine.global_steps, engine.skipped_steps) == (8, 7)
    assert engine.get_global_grad_norm() > 0


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_answers_what_clients_ask(stage: int) -> None:
    run_ranks(_answers, 2, stage)


def _moves_state(rank: int, world_size: int, stage: int) -> None:
    model = build(Mlp, dtype=torch.float64)
    handles = []
    engine = make_engine(model, config(**sharding(stage)), optimizer=sgd(model))
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append("theirs"))
    model._forward_pre_hooks.move_to_end(handle.id)  # ms-swift, after initialize
    handles.append(handle)
    batches = make_batches(model, 4, 1, world_size)
    optimizer = engine.optimizer
    assert optimizer is not None
    assert {"lr", "momentum"} <= optimizer.defaults.keys()
    for _ in fit(engine, batches, rank):
        assert isinstance(optimizer.state, MutableMapping)
        assert len(optimizer.state) > 0
        for key, state in optimizer.state.items():  # Lightning, when it tears down
            optimizer.state[key] = {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}
    assert calls == ["theirs"] * 4
    assert relative_difference(masters(engine), wanted(batches)) <= FP64_ROUNDING


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_and_state_that_clients_move_change_no_training(stage: int) -> None:
    run_ranks(_moves_state, 2, stage)


def _schedules(rank: int, world_size: int) -> list[Any]:
    model, seen = build(Mlp, dtype=torch.float64), []

    class Told(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            seen.append(epoch)
            super().step(epoch)

    optimizer = sgd(model)
    engine = make_engine(model, config(), optimizer=optimizer, lr_scheduler=Told(optimizer, lambda step: 1.0))
    seen.clear()  # torch steps a new schedule once
    (micro,) = make_batches(model, 1, 1, world_size)[0]
    for lr_kwargs in (None, {"epoch": 5}):
        engine.backward(engine(*micro[rank]))
        engine.step(lr_kwargs=lr_kwargs)
    return seen


def test_words_for_the_schedule_reach_it() -> None:
    assert run_ranks(_schedules, 1) == [[None, 5]]


def _masters_by_group(rank: int, world_size: int, stage: int) -> list[float]:
    model = build(Mlp)
    engine = make_engine(model, config(bf16={"enabled": True}, **sharding(stage)), optimizer=sgd(model))
    (micro,) = make_batches(model, 1, 1, world_size)[0]
    engine.backward(engine(*(each.bfloat16() for each in micro[rank])))
    engine.step()
    optimizer: Any = engine.optimizer
    groups = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    assert {each.dtype for each in itertools.chain(*groups)} == {torch.float32}  # as Transformers' tests read them
    whole = [safe_get_full_fp32_param(param) for param in model.parameters()]
    assert {weight.dtype for weight in model_weights(engine).values()} == {torch.bfloat16}
    return [float(sum(each.double().sum() for each in groups)), float(sum(each.double().sum() for each in whole))]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_are_read_group_by_group(stage: int) -> None:
    found = run_ranks(_masters_by_group, 2, stage)
    assert sum(mine for mine, _ in found) == pytest.approx(found[0][1], rel=1e-12)


# -- pipelines ----------------------------------------------------------------------------------------------------------


def _pipelines(rank: int, world_size: int) -> list[list[float]]:
    """As Megatron-DeepSpeed drives one when lengths change, and as it is when they do not."""
    losses = []
    for is_megatron in (False, True):
        engine = make_pipeline(layers(2), 2, config(2, 2, **zero(1)), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        found = []
        for batches in (token_batches(1, 2, 1), token_batches(1, 2, 1, lengths=(3,))):
            if is_megatron:
                engine.set_has_attention_mask(True)
                engine.reset_activation_shape()
                engine.first_output_send = True
                engine.pipe_recv_buf = None
            found += train_pipeline(engine, batches)
            assert engine.total_loss is not None
            assert float(engine.total_loss) / 2 == pytest.approx(found[-1], rel=1e-12)  # of two micro-batches
        grid = engine.grid
        assert (grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()) == (0, 1)
        assert torch.distributed.get_process_group_ranks(grid.get_slice_parallel_group()) == [rank]
        assert grid.get_pipe_parallel_rank() == engine.stage_id == rank
        losses.append(found)
        engine.destroy()
    return losses


def test_a_pipeline_takes_what_clients_say_when_lengths_change() -> None:
    for plain, told in run_ranks(_pipelines, 2):
        assert plain == told
        assert plain[0] != plain[1]


# -- ranks --------------------------------------------------------------------------------------------------------------


def _begins(rank: int, world_size: int, words: dict[str, Any]) -> int:
    backend = words.pop("backend", None)
    deepspeed.init_distributed(*([] if backend is None else [backend]), **words)
    assert torch.distributed.is_initialized()
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return int(ones)


@pytest.mark.parametrize(
    "words",
    [
        {"backend": "gloo", "distributed_port": 29500, "timeout": timedelta(minutes=30)},  # Lightning
        {"dist_backend": None, "auto_mpi_discovery": False, "timeout": timedelta(minutes=5)},  # Accelerate
        {"dist_backend": "gloo", "auto_mpi_discovery": True, "distributed_port": "6000", "verbose": True},  # GPT-NeoX
    ],
    ids=["Lightning", "Accelerate", "GPT-NeoX"],
)
def test_ranks_begin_by_the_words_of_each_client(words: dict[str, Any]) -> None:
    """The launcher's variables are there; torch's own group is what comes of it."""
    assert run_ranks(_begins, 2, words, init=False) == [2, 2]
