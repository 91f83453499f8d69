"""`engine.destroy()` waits for no other rank; sharded parameters become whole when they are used."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from tests.support.engines import config, make_engine, train, zero
from tests.support.models import Mlp, TiedGpt, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STAGES = (0, 1, 2, 3)
USES = ("forward", "state_dict", "data", "GatheredParameters", "initialize", "torch")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _engine(model: nn.Module, stage: int) -> Any:
    return make_engine(model, config(**zero(stage, stage3_param_persistence_threshold=0)), optimizer=sgd(model))


def _wanted(batches: Any, model_class: Any = TiedGpt) -> dict[str, Tensor]:
    plain = build(model_class, dtype=torch.float64)
    return train_reference(plain, lambda params: torch.optim.SGD(params, lr=0.1), batches).weights


def _first_rank_destroys(rank: int, world_size: int) -> None:
    """As Transformers' search does between two trials: the others go on, and drop their engine or destroy it later."""
    for stage in STAGES:
        for is_destroyed_later in (False, True):
            model = build(TiedGpt, dtype=torch.float64)
            batches = make_batches(model, 2, 1, world_size)
            engine = _engine(model, stage)
            train(engine, batches, rank)
            if rank == 0:
                engine.destroy()
                del engine, model
                gc.collect()
            told = [f"trial {stage}"]
            dist.broadcast_object_list(told, src=0)
            if rank > 0 and is_destroyed_later:
                engine.destroy()
            again = build(TiedGpt, dtype=torch.float64)
            outcome = train(_engine(again, stage), batches, rank)
            assert relative_difference(outcome.weights, _wanted(batches)) <= FP64_ROUNDING


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_destroys_its_engine_waits_for_no_other(world_size: int) -> None:
    run_ranks(_first_rank_destroys, world_size)


def _used(model: Any, use: str, batch: Any) -> None:
    if use == "forward":
        model(*batch)
    elif use == "state_dict":
        model.state_dict()
    elif use == "data":
        next(iter(model.parameters())).data  # noqa: B018
    elif use == "GatheredParameters":
        with deepspeed.zero.GatheredParameters(model.parameters()):
            assert all(param.numel() > 0 for param in model.parameters())
    elif use == "initialize":
        _engine(model, 3).destroy()


def _uses(rank: int, world_size: int) -> None:
    for use in USES:
        model = build(TiedGpt, dtype=torch.float64)
        batches = make_batches(model, 3, 1, world_size)
        engine = _engine(model, 3)
        train(engine, batches[:2], rank)
        engine.destroy()
        params = list(model.parameters())
        with torch._C.DisableTorchFunctionSubclass():
            assert all(param.numel() == 0 for param in params)  # nothing has been gathered
        if rank == 0:  # what a rank may do alone
            model.zero_grad()
            assert all(param.grad is None and param.requires_grad for param in {*params})
        dist.barrier()
        _used(model, use, batches[0][0][rank])
        assert all(type(param) is nn.Parameter for param in params) or use in ("initialize", "torch")
        if use == "torch":
            optimizer = sgd(model)
            model(*batches[2][0][rank]).backward()
            for param in params:
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= world_size
            optimizer.step()
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        done = batches if use == "torch" else batches[:2]
        assert relative_difference(weights, _wanted(done)) <= FP64_ROUNDING, use


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_whole_whatever_they_are_used_for(world_size: int) -> None:
    if world_size == 1:
        run_ranks(_uses_alone, 1)
    else:
        run_ranks(_uses, world_size)


def _uses_alone(rank: int, world_size: int) -> None:
    """There is nobody to wait for: whole at once."""
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, 2, 1, 1)
    engine = _engine(model, 3)
    train(engine, batches, rank)
    engine.destroy()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert relative_difference(weights, _wanted(batches, Mlp)) <= FP64_ROUNDING


def _evaluated(rank: int, world_size: int) -> None:
    """An engine without an optimizer, and one with frozen layers."""
    for optimizer in (None, sgd):
        model = build(Mlp, dtype=torch.float64)
        model.first.requires_grad_(False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        settings = config(**zero(3, stage3_param_persistence_threshold=0))
        engine = make_engine(model, settings, optimizer=None if optimizer is None else sgd(model.second))
        engine(*make_batches(model, 1, 1, world_size)[0][0][rank])
        engine.destroy()
        engine.destroy()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_frozen_parameters_too() -> None:
    run_ranks(_evaluated, 2)


def _left(rank: int, world_size: int) -> int:
    model = build(TiedGpt)
    engine = _engine(model, 3)
    engine.destroy()
    references = [weakref.ref(each) for each in (engine, model, *model.parameters())]
    del engine, model
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_a_model_that_nobody_uses_again_leaves_nothing() -> None:
    assert run_ranks(_left, 2) == [0, 0]
