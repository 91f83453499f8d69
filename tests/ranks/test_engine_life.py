"""What an engine owes its model, its optimizer and its peers when things do not go by the book."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import pickle
import warnings
import weakref
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import ArgumentError, UsageError
from tests.support.engines import config, make_engine, masters, train, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.pipelines import layers, make_pipeline, token_batches, train_pipeline
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _gradients_on_one_rank_only(rank: int, world_size: int) -> None:
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, 3)
    engine = make_engine(model, config(), optimizer=sgd(model))
    for step in batches:
        if rank == 0:
            engine.backward(engine(*step[0][0]))
        engine.step()
    wanted = build(Mlp, dtype=torch.float64)
    train_reference(wanted, lambda params: torch.optim.SGD(params, lr=0.1 / world_size), batches)
    assert relative_difference(weights(model), weights(wanted)) <= FP64_ROUNDING


def _a_dropped_gradient_stays_dropped(rank: int, world_size: int) -> None:
    model = build(Mlp)
    before = weights(model)
    engine = make_engine(model, config(), optimizer=sgd(model))
    engine.backward(engine(*model.batch(4, rank)))
    model.zero_grad()
    engine.step()
    assert relative_difference(weights(model), before) == 0


def _wrapping_again_leaves_the_newer_engine_alone(rank: int, world_size: int) -> None:
    model = build(Mlp, dtype=torch.float64)
    old = make_engine(model, config(), optimizer=sgd(model))
    batches = make_batches(model, 2, 1, world_size)
    wanted = train_reference(
        build(Mlp, dtype=torch.float64), lambda params: torch.optim.SGD(params, lr=0.1), batches
    ).weights
    engine = make_engine(model, config(), optimizer=sgd(model))
    for step in batches:
        engine.backward(engine(*step[0][rank]))
        old.destroy()
        engine.step()
    assert relative_difference(weights(model), wanted) <= FP64_ROUNDING


def _wrapped_again_while_the_first_engine_lives(rank: int, world_size: int) -> None:
    """At every stage, whether the first engine trained or only evaluated: the second trains as if it were the first."""
    same_stage = [(stage, has_optimizer, stage) for stage in range(4) for has_optimizer in (True, False)]
    for stage, has_optimizer, next_stage in [*same_stage, (3, True, 1), (1, True, 3)]:
        for trained in (("first", "second"), ("second",)) if stage == 3 else (("first", "second"),):
            case = f"stage {stage}, {has_optimizer=}, then stage {next_stage}, {trained=}"
            model, twin = (build(Mlp, dtype=torch.float64) for _ in range(2))
            for each in (model, twin):
                each.first.requires_grad_("first" in trained)
            batches = make_batches(model, 3, 1, world_size)
            old = make_engine(model, config(**_sharding(stage)), optimizer=sgd(model) if has_optimizer else None)
            if has_optimizer:
                train(old, batches[:1], rank)
            else:
                old(*batches[0][0][rank])
            engine = make_engine(model, config(**_sharding(next_stage)), optimizer=sgd(model))
            train(engine, batches[1:2], rank)
            _uses_are_refused(
                old, batches[0][0][rank], has_optimizer=has_optimizer, held_parameters=has_optimizer or stage == 3
            )
            old.destroy()
            train(engine, batches[2:], rank)
            engine.destroy()
            done = batches if has_optimizer else batches[1:]
            train_reference(twin, lambda params: torch.optim.SGD(params, lr=0.1), done)
            assert relative_difference(weights(model), weights(twin)) <= FP64_ROUNDING, case


def _uses_are_refused(old: Any, batch: tuple[Any, ...], *, has_optimizer: bool, held_parameters: bool) -> None:
    """What would change or save the newer engine's parameters behind its back; a forward may go on."""
    trains, holds = (
        (old.step, lambda: old.backward(old(*batch))),
        (
            old.zero_grad,
            lambda: old.save_checkpoint("nowhere"),
            lambda: old.load_checkpoint("nowhere"),
            lambda: old.load_module_state_dict({}),
            lambda: old.save_16bit_model("nowhere"),
        ),
    )
    for use in trains:
        with pytest.raises(
            UsageError if has_optimizer else ArgumentError,
            match="Use the newer engine" if has_optimizer else "Give initialize\\(\\) an optimizer",
        ):
            use()
    for use in holds if held_parameters else ():
        with pytest.raises(UsageError, match="Use the newer engine"):
            use()


def _sharding(stage: int) -> dict[str, Any]:
    return zero(
        stage,
        **(
            {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
            if stage == 3
            else {}
        ),
    )


def _the_older_engine_says_so(rank: int, world_size: int) -> None:
    model = build(Mlp)
    old = make_engine(model, config(), optimizer=sgd(model))
    old.backward(old(*model.batch(4, rank)))
    make_engine(model.second, config(), optimizer=sgd(model.second))
    with pytest.raises(UsageError, match="no longer owns"):
        old.step()
    with pytest.raises(UsageError, match="no longer owns"):
        old.backward(old(*model.batch(4, rank)))


def _destroy_gives_the_optimizer_back(rank: int, world_size: int) -> None:
    model = build(Mlp)
    optimizer = sgd(model)
    engine = make_engine(model, config(), optimizer=optimizer)
    for call in (optimizer.step, lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})):
        with pytest.raises(UsageError, match="engine"):
            call()
    engine.destroy()
    before = weights(model)
    model(*model.batch(4, 0)).backward()
    optimizer.step()
    assert relative_difference(weights(model), before) > 0
    again = make_engine(model, config(), optimizer=optimizer)
    assert again.optimizer is not None


def _the_client_may_zero_gradients_through_its_own_optimizer(rank: int, world_size: int) -> None:
    model = build(Mlp)
    before = weights(model)
    optimizer = sgd(model)
    engine = make_engine(model, config(), optimizer=optimizer)
    engine.backward(engine(*model.batch(4, rank)))
    optimizer.zero_grad()
    engine.step()
    assert relative_difference(weights(model), before) == 0


def _models_are_copied_and_saved_while_they_train(rank: int, world_size: int) -> None:
    model = build(Mlp)
    make_engine(model, config(), optimizer=sgd(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert relative_difference(weights(each), weights(model)) == 0
        engine = make_engine(each, config(), optimizer=sgd(each))
        engine.backward(engine(*each.batch(4, rank)))
        engine.step()
        engine.destroy()
        assert relative_difference(weights(each), weights(model)) > 0
    assert make_engine(model, config(), optimizer=sgd(model)).optimizer is not None


def _torch_schedules_do_not_complain(rank: int, world_size: int) -> None:
    for is_bound_before in (True, False):
        model = build(Mlp)
        optimizer = sgd(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make = torch.optim.lr_scheduler.StepLR
            before = make(optimizer, 1) if is_bound_before else None
            engine = make_engine(model, config(), optimizer=optimizer, lr_scheduler=before)
            schedule = before or make(engine.optimizer, 1)  # type: ignore[arg-type]
            for step in make_batches(model, 2, 1, world_size):
                train(engine, [step], rank)
                if not is_bound_before:
                    schedule.step()
        assert engine.get_lr() == pytest.approx([0.1 * 0.1**2])


def _values_loaded_after_initialize_are_trained_on(rank: int, world_size: int) -> None:
    """Under bf16 they reach the masters; values that were not touched keep their full precision."""
    model = build(Mlp)
    engine = make_engine(model, config(bf16={"enabled": True}), optimizer=sgd(model, rate=0.0))
    before = masters(engine)
    model.first.load_state_dict({name: torch.full_like(p, 0.3) for name, p in model.first.named_parameters()})
    with torch.no_grad():
        model.second.bias[0] = 7.0
    engine.backward(engine(*(t.bfloat16() for t in model.batch(4, rank))))
    engine.step()
    after = masters(engine)
    assert torch.equal(model.first.weight, torch.full_like(model.first.weight, 0.3))
    assert torch.equal(after["first.weight"], model.first.weight.float())
    assert torch.equal(after["second.weight"], before["second.weight"])
    assert after["second.bias"][0] == model.second.bias[0] == 7.0
    assert torch.equal(after["second.bias"][1:], before["second.bias"][1:])


def _storage_replaced_after_initialize_is_trained(rank: int, world_size: int) -> None:
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, 3, 1, world_size)
    wanted = train_reference(
        build(Mlp, dtype=torch.float64), lambda params: torch.optim.SGD(params, lr=0.1), batches
    ).weights
    engine = make_engine(model, config(), optimizer=sgd(model))
    for step in batches:
        model._apply(torch.clone)  # as a round trip to another device does: parameters and gradients are other tensors
        train(engine, [step], rank)
    assert relative_difference(weights(model), wanted) <= FP64_ROUNDING


def _a_model_converted_after_initialize_is_refused(rank: int, world_size: int) -> None:
    model = build(Mlp)
    engine = make_engine(model, config(), optimizer=sgd(model))
    engine.double()
    with pytest.raises(UsageError, match=r"'(first|second)\.(weight|bias)' became .* torch.float64"):
        train(engine, [[[tuple(t.double() for t in model.batch(4, rank))] * world_size]], rank)


LIVES = [
    _values_loaded_after_initialize_are_trained_on,
    _storage_replaced_after_initialize_is_trained,
    _a_model_converted_after_initialize_is_refused,
    _gradients_on_one_rank_only,
    _a_dropped_gradient_stays_dropped,
    _wrapping_again_leaves_the_newer_engine_alone,
    _wrapped_again_while_the_first_engine_lives,
    _the_older_engine_says_so,
    _destroy_gives_the_optimizer_back,
    _the_client_may_zero_gradients_through_its_own_optimizer,
    _models_are_copied_and_saved_while_they_train,
    _torch_schedules_do_not_complain,
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__.strip("_"))
def test_an_engine_keeps_its_word(life: Any, world_size: int) -> None:
    run_ranks(life, world_size)


def _launches_during_backward(rank: int, world_size: int) -> list[bool]:
    """For each boundary backward: was a bucket launched before the last gradient had come?"""
    model = build(Mlp)
    engine = make_engine(model, config(3, zero_optimization={"reduce_bucket_size": 20}), optimizer=sgd(model))
    assert engine.optimizer is not None
    buckets = engine.optimizer.reducer._buckets
    found = []

    def is_early(_: torch.Tensor) -> None:
        if engine.is_gradient_accumulation_boundary():
            found.append(buckets[0].is_launched)

    model.first.weight.register_hook(is_early)  # its gradient is among the last
    for step in make_batches(model, 3, 3, world_size):
        train(engine, [step], rank)
    return found


def test_reduction_overlaps_with_backward_after_the_first_step_with_accumulation_too() -> None:
    assert run_ranks(_launches_during_backward, 2) == [[False, True, True]] * 2


def _culprit(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("DeepSpeed").addHandler(handler)
    model = build(Mlp)
    engine = make_engine(model, config(fp16={"enabled": True, "initial_scale_power": 14}), optimizer=sgd(model))
    inputs, targets = (t.half() for t in model.batch(4, rank))
    loss = engine(inputs, targets * 0 - 5)  # gradients of one sign: each is finite, their sum is beyond fp16
    engine.backward(loss * float("inf") if rank == 1 else loss)
    engine.step()
    return [message for message in messages if "skipped" in message]


def test_the_log_blames_the_rank_whose_gradient_was_not_finite_and_no_other() -> None:
    messages = run_ranks(_culprit, 2)
    assert "brought by rank 1;" in messages[0][0]


def _destroyed_twice(rank: int, world_size: int) -> bool:
    model = build(Mlp)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = config(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), None):  # training, and evaluation alone
        engine = make_engine(model, settings, optimizer=optimizer)
        assert all(param.numel() == 0 for param in model.parameters())
        engine.destroy()
        engine.destroy()
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_sharded_model_is_whole_after_destroy_however_often_that_is_called() -> None:
    assert run_ranks(_destroyed_twice, 2) == [True, True]


def _dropped(rank: int, world_size: int) -> list[int]:
    remaining = []
    for stage in (0, 1, 2, 3):
        model = build(Mlp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        (micros,) = make_batches(model, 1, 1, world_size)
        blocks = {"bf16": {"enabled": True}, **zero(stage, stage3_param_persistence_threshold=0)}
        engine = make_engine(model, config(**blocks), optimizer=optimizer)
        engine.backward(engine(*(t.bfloat16() for t in micros[0][rank])))
        engine.step()
        kept = [engine, model, *model.parameters(), *engine.optimizer.master.flats]
        references = [weakref.ref(each) for each in kept]
        del engine, model, optimizer, kept
        gc.collect()
        remaining.append(sum(each() is not None for each in references))
    return remaining


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_engine_that_is_dropped_leaves_nothing_in_memory(world_size: int) -> None:
    assert run_ranks(_dropped, world_size) == [[0, 0, 0, 0]] * world_size


def _threads_of_pipelines(_rank: int, _world_size: int) -> list[int]:
    counts = []
    for _ in range(3):
        engine = make_pipeline(layers(3), 3, config(2, 2, **zero(1)), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        train_pipeline(engine, token_batches(1, 2, 1))
        engine.destroy()
        counts.append(psutil.Process().num_threads())
    return counts


def test_pipelines_one_after_another_do_not_collect_threads() -> None:
    for counts in run_ranks(_threads_of_pipelines, 3):  # ties of the first and last stage have a group of their own
        assert max(counts[1:]) <= counts[0]  # one that a library started may have ended meanwhile


def _stepped_through_the_optimizer(rank: int, world_size: int) -> tuple[bool, str]:
    """Whether the weights are those of `engine.step()`, and what a second step without a backward says."""
    found = []
    for steps_by_optimizer in (False, True):
        model = build(Mlp, dtype=torch.float64)
        engine = make_engine(model, config(2, **zero(2)), optimizer=sgd(model))
        for micros in make_batches(model, 2, 2, world_size):
            for micro in micros:
                engine.backward(engine(*micro[rank]))
                (engine.optimizer if steps_by_optimizer else engine).step()
        found.append(weights(model))
    said = ""
    try:
        engine.optimizer.step()
    except UsageError as error:
        said = str(error)
    return all(torch.equal(found[0][name], value) for name, value in found[1].items()), said


def test_a_step_of_the_optimizer_is_the_engines_and_one_without_a_backward_is_refused() -> None:
    for is_equal, said in run_ranks(_stepped_through_the_optimizer, 2):
        assert is_equal
        assert "no engine.backward() has gone before it" in said


def _small_parameters_of_the_newer_engine(rank: int, world_size: int) -> list[float]:
    model = build(Mlp)
    settings = config(**zero(3))  # all of this model's parameters are small
    older = make_engine(model, settings, optimizer=sgd(model))
    newer = make_engine(model, settings, optimizer=sgd(model))
    older.destroy()
    param = next(newer.module.parameters())
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
        if rank == 0:
            param.data.fill_(7)
    return [float(param.detach().min()), float(param.detach().max())]


def test_the_end_of_an_older_engine_leaves_small_parameters_to_the_newer() -> None:
    assert run_ranks(_small_parameters_of_the_newer_engine, 2) == [[7, 7], [7, 7]]


class _Stop(torch.autograd.Function):
    is_on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _Stop.is_on:
            raise KeyboardInterrupt
        return gradient


def _repeated_after_an_interrupt(rank: int, world_size: int) -> list[bool]:
    """Weights after the batch was stopped in its second micro-batch and repeated, against those of a run without."""
    same = []
    for stage in (0, 2, 3):
        found = []
        for is_stopped in (False, True):
            model = build(Mlp, dtype=torch.float64)
            blocks = {"wall_clock_breakdown": True, **zero(stage)}
            engine = make_engine(model, config(2, **blocks), optimizer=sgd(model))
            for number, micros in enumerate(make_batches(model, 2, 2, world_size)):
                if is_stopped and number == 1:
                    engine.backward(engine(*micros[0][rank]))
                    engine.step()
                    _Stop.is_on = True
                    with pytest.raises(KeyboardInterrupt):
                        engine.backward(_Stop.apply(engine(*micros[1][rank])))
                    _Stop.is_on = False
                    engine.zero_grad()
                for micro in micros:
                    engine.backward(engine(*micro[rank]))
                    engine.step()
            found.append((engine.global_steps, masters(engine)))
        (steps, expected), (steps_again, got) = found
        same.append(steps == steps_again and all(torch.equal(got[name], value) for name, value in expected.items()))
    return same


def test_a_batch_that_was_interrupted_is_repeated_whole() -> None:
    assert run_ranks(_repeated_after_an_interrupt, 1) == [[True] * 3]


def _stepped_by_both(rank: int, world_size: int) -> tuple[int, str]:
    model = build(Mlp)
    engine = make_engine(model, config(), optimizer=sgd(model))
    ((micro,),) = make_batches(model, 1, 1, world_size)
    engine.backward(engine(*micro[rank]))
    engine.optimizer.step()
    try:
        engine.step()
    except UsageError as error:
        return engine.global_steps, str(error)
    return engine.global_steps, ""


def test_the_engine_does_not_step_again_after_its_optimizer() -> None:
    for steps, said in run_ranks(_stepped_by_both, 2):
        assert steps == 1
        assert "Call one of the two" in said


def _timed_after_a_forward_that_raised(rank: int, world_size: int) -> list[bool]:
    model = build(Mlp)
    engine = make_engine(model, config(wall_clock_breakdown=True), optimizer=sgd(model))
    with pytest.raises(RuntimeError):
        engine(torch.ones(2, 999), torch.ones(2))
    is_running = engine._parts.report.timers("forward").started
    before = weights(model)
    train(engine, make_batches(model, 1, 1, world_size), rank)
    return [is_running, relative_difference(weights(model), before) > 0]


def test_a_forward_that_raised_leaves_no_stopwatch_running() -> None:
    assert run_ranks(_timed_after_a_forward_that_raised, 1) == [[False, True]]
