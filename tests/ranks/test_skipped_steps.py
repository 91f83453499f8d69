"""Two engines that move together or not at all, as DeepSpeed-Chat's actor and critic do (`--align_overflow`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engines import config, make_engine, masters, zero
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import relative_difference

STAGES = (0, 1, 2, 3)
STEPS, BROKEN = 4, 1
SCALE = 16.0


def _engine(stage: int, rate: float) -> Any:
    model = build(Mlp)
    blocks = zero(stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": rate, "warmup_num_steps": 10, "warmup_type": "linear"}}
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    settings = config(fp16=fp16, scheduler=schedule, **blocks)
    return make_engine(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9))


def _backward(engine: Any, micro: tuple[Tensor, ...], times: float = 1.0) -> None:
    dtype = next(iter(engine.module.parameters())).dtype
    engine.backward(engine(*(each.to(dtype) for each in micro)).float() * times)


def _facts(engine: Any) -> tuple[Any, ...]:
    optimizer = engine.optimizer
    return engine.was_step_applied(), engine.skipped_steps, optimizer.overflow, optimizer.cur_scale, engine.get_lr()


def _together(rank: int, world_size: int, stage: int) -> None:
    """Rank 1 of the actor meets an infinity in one step: neither engine makes it, and only the actor's scale falls."""
    actor, critic = _engine(stage, 0.1), _engine(stage, 0.05)
    alone = _engine(stage, 0.05)
    batches = make_batches(build(Mlp), STEPS, 1, world_size)
    for number, (micro,) in enumerate(batches):
        before = masters(critic)
        _backward(actor, micro[rank], float("inf") if (rank, number) == (1, BROKEN) else 1.0)
        _backward(critic, micro[rank])
        first, second = (each.optimizer.check_overflow(external=True) for each in (actor, critic))
        assert (first, second) == (number == BROKEN, False)
        if first and not second:
            critic.optimizer.skip_step = True
        rates = critic.get_lr()
        actor.step()
        critic.step()
        if number == BROKEN:
            assert _facts(actor) == (False, 1, True, SCALE / 2, actor.get_lr())
            assert _facts(critic) == (False, 1, True, SCALE, rates)
            assert relative_difference(masters(critic), before) == 0.0
        else:
            assert actor.was_step_applied()
            assert critic.was_step_applied()
            _backward(alone, micro[rank])
            alone.step()
    assert critic.global_steps == STEPS
    got, want = masters(critic), masters(alone)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert critic.get_lr() == alone.get_lr()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_one_engine_skips_is_skipped_by_the_other_as_if_it_had_never_been(stage: int) -> None:
    run_ranks(_together, 2, stage)


def _one_rank_asks(rank: int, world_size: int, stage: int) -> tuple[Any, ...]:
    engine = _engine(stage, 0.1)
    (micro,) = make_batches(build(Mlp), 1, 1, world_size)[0]
    before = masters(engine)
    _backward(engine, micro[rank])
    engine.optimizer.skip_step = rank == 1
    engine.step()
    assert relative_difference(masters(engine), before) == 0.0
    return _facts(engine)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_that_asks_skips_the_step_of_all_alike(stage: int) -> None:
    first, *others = run_ranks(_one_rank_asks, 3, stage)
    assert first[:4] == (False, 1, True, SCALE)
    assert others == [first] * 2
