from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.support import models
from tests.support.reference import relative_difference, train_reference

ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1)


def _plain_loop(
    model: models.TinyModel, optimizer: torch.optim.Optimizer, batches: models.Batches, clip: float
) -> list[float]:
    """The same training on one big batch per step."""
    losses = []
    for step in batches:
        flat = [batch for micro in step for batch in micro]
        big = tuple(torch.cat(parts) for parts in zip(*flat, strict=True))
        optimizer.zero_grad()
        loss = model(*big)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model_class", [models.Mlp, models.TiedLm, models.PartlyFrozen, models.WithEmptyParameter])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_ranks_and_micro_batches_come_to_one_big_batch(model_class: type[models.TinyModel], clip: float | None) -> None:
    model, plain = (models.build(model_class, dtype=torch.float64) for _ in range(2))
    batches = models.make_batches(model, steps=5, micro_batches=2, world_size=3)
    outcome = train_reference(model, ADAM, batches, clip=clip)
    losses = _plain_loop(plain, ADAM([p for p in plain.parameters() if p.requires_grad]), batches, clip or math.inf)
    # float64: five steps of at most a few hundred roundings of 1.1e-16 each
    assert outcome.losses == pytest.approx(losses, rel=1e-12)
    assert relative_difference(outcome.model_weights, dict(plain.named_parameters())) < 1e-12


def test_the_outcome_names_weights_state_and_the_norm_before_clipping() -> None:
    model = models.build(models.PartlyFrozen)
    outcome = train_reference(model, ADAM, models.make_batches(model, steps=3), 2, clip=1e-3)
    assert set(outcome.weights) == {"second.weight", "second.bias"}
    assert set(outcome.model_weights) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert set(outcome.state["second.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert len(outcome.norms) == len(outcome.losses) == 2
    assert all(norm > 1e-3 for norm in outcome.norms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_training_keeps_masters_and_rounds_the_model(dtype: torch.dtype) -> None:
    model = models.build(models.Mlp)
    full = train_reference(models.build(models.Mlp), SGD, models.make_batches(model, steps=4))
    batches = [[[tuple(t.to(dtype) for t in b) for b in m] for m in s] for s in models.make_batches(model, steps=4)]
    outcome = train_reference(model, SGD, batches, dtype=dtype, loss_scale=64.0, reduce_dtype=torch.float32)
    assert {w.dtype for w in outcome.weights.values()} == {torch.float32}
    assert all(torch.equal(outcome.weights[n].to(dtype), w) for n, w in outcome.model_weights.items())
    # bf16 keeps 8 bits: 2**-8 per rounding, four steps
    assert 0 < relative_difference(outcome.weights, full.weights) < 4 * 2**-8


def test_a_power_of_two_loss_scale_changes_no_bit_in_float32() -> None:
    outcomes = []
    for scale in (1.0, 1024.0):
        model = models.build(models.Mlp)
        outcomes.append(train_reference(model, SGD, models.make_batches(model, steps=3), loss_scale=scale))
    assert relative_difference(outcomes[0].weights, outcomes[1].weights) == 0.0


def test_the_schedule_is_stepped_once_per_step() -> None:
    model = models.build(models.Mlp)
    rates: list[float] = []

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates.append(step) or 0.0)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    outcome = train_reference(model, SGD, models.make_batches(model, steps=3), scheduler_factory=schedule)
    assert rates == [0, 1, 2, 3]
    assert relative_difference(outcome.weights, before) == 0.0


def test_relative_difference_sees_names_shapes_and_nan() -> None:
    one = {"a": torch.ones(2)}
    assert relative_difference(one, {"a": torch.tensor([1.0, 2.0])}) == 0.5
    assert relative_difference({"a": torch.tensor([math.nan, 1.0])}, one) == math.inf
    with pytest.raises(AssertionError, match="names differ"):
        relative_difference(one, {"b": torch.ones(2)})
    with pytest.raises(AssertionError, match="shape"):
        relative_difference(one, {"a": torch.ones(3)})
