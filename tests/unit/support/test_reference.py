from __future__ import annotations

import math
from functools import partial
from typing import Any

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
    outcome = train_reference(model, SGD, batches, dtype=dtype, loss_scale=64.0, communication_dtype=torch.float32)
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


class OneWeight(torch.nn.Module):
    """The loss is weight x input, so the gradient is the input: what is averaged can be chosen digit by digit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _update(gradients: list[list[float]], **options: Any) -> float:
    """The mean gradient that one step of SGD at rate 1 takes in bf16, from `gradients[micro_batch][rank]`."""
    step = [[(torch.tensor(g, dtype=torch.bfloat16),) for g in micro] for micro in gradients]
    one = partial(torch.optim.SGD, lr=1.0)
    return -train_reference(OneWeight(), one, [step], dtype=torch.bfloat16, **options).weights["weight"].item()


def test_micro_batches_are_added_in_the_accumulation_dtype() -> None:
    # bf16 has 8 bits: 1 + 1/256 lies between 1 and 1 + 1/128 and rounds to even, 1; its half is then 0.5.
    gradients = [[1.0], [1 / 256]]
    assert _update(gradients) == 0.5
    assert _update(gradients, accumulation_dtype=torch.float32) == 0.5 + 1 / 512


def test_ranks_are_added_wide_and_the_mean_is_rounded_to_what_travels() -> None:
    # Added in bf16 step by step, 1 + 1/256 + 1/256 + 0 would be 1; in fp32 it is 1 + 1/128, and a quarter of that exists.
    assert _update([[1.0, 1 / 256, 1 / 256, 0.0]]) == 0.25 + 1 / 512
    # (1 + 1/256) / 2 does not exist in bf16: it rounds to 0.5, unless both what travels and what accumulates are wider.
    assert _update([[1.0, 1 / 256]]) == 0.5
    wide = {"communication_dtype": torch.float32, "accumulation_dtype": torch.float32}
    assert _update([[1.0, 1 / 256]], **wide) == 0.5 + 1 / 512
    assert _update([[1.0, 1 / 256]], communication_dtype=torch.float32) == 0.5
    assert _update([[1.0, 1 / 256]], accumulation_dtype=torch.float32) == 0.5


def test_where_ranks_are_averaged_decides_what_is_rounded() -> None:
    # Rank 0 brings 1 and 1/256, rank 1 nothing. Accumulated in bf16 the small one is lost either way.
    gradients = [[1.0, 0.0], [1 / 256, 0.0]]
    assert _update(gradients) == 0.25
    assert _update(gradients, averages_each_micro_batch=True) == 0.25
    # In fp32 the means 0.5 and 1/512 are added exactly; the mean of the exact sum is rounded when it travels.
    wide = {"accumulation_dtype": torch.float32}
    assert _update(gradients, averages_each_micro_batch=True, **wide) == (0.5 + 1 / 512) / 2
    assert _update(gradients, **wide) == 0.25


def test_the_place_of_the_average_does_not_matter_in_float64() -> None:
    outcomes = []
    for each in (False, True):
        model = models.build(models.TiedGpt, dtype=torch.float64)
        batches = models.make_batches(model, steps=3, micro_batches=3, world_size=3)
        outcomes.append(train_reference(model, ADAM, batches, averages_each_micro_batch=each))
    assert relative_difference(outcomes[0].weights, outcomes[1].weights) < 1e-12


def test_a_parameter_that_nothing_used_is_passed_over_or_has_the_gradient_zero() -> None:
    outcomes = []
    for zero in (False, True):
        model = models.build(models.WithUnusedParameter)
        batches = models.make_batches(model, steps=2)
        outcomes.append(train_reference(model, ADAM, batches, unused_counts_as_zero=zero))
    passed_over, zeroed = outcomes
    start = models.build(models.WithUnusedParameter).unused.weight
    assert torch.equal(passed_over.weights["unused.weight"], start)
    assert "unused.weight" not in passed_over.state
    assert not torch.equal(zeroed.weights["unused.weight"], start)  # weight decay
    assert not zeroed.state["unused.weight"]["exp_avg"].any()


def test_relative_difference_sees_names_shapes_and_nan() -> None:
    one = {"a": torch.ones(2)}
    assert relative_difference(one, {"a": torch.tensor([1.0, 2.0])}) == 0.5
    assert relative_difference({"a": torch.tensor([math.nan, 1.0])}, one) == math.inf
    with pytest.raises(AssertionError, match="names differ"):
        relative_difference(one, {"b": torch.ones(2)})
    with pytest.raises(AssertionError, match="shape"):
        relative_difference(one, {"a": torch.ones(3)})
