"""Training on N ranks equals training in one process, at every accumulation and clipping setting."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from tests.support.engines import config, make_engine, masters, moments, train
from tests.support.models import (
    Mlp,
    PartlyFrozen,
    SparseEmbedding,
    TiedLm,
    WithEmptyParameter,
    WithUnusedParameter,
    build,
    make_batches,
)
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

STEPS = 20
WORLD_SIZES = (1, 2, 3)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {"adam": ADAM, "sgd": SGD}

# In fp32 (6e-8 per operation) the order of sums over ranks differs from the reference's; Adam divides by sqrt(v), which
# amplifies it where gradients are near zero.
TOLERANCE = {
    ("adam", torch.float64): FP64_ROUNDING,
    ("sgd", torch.float64): FP64_ROUNDING,
    ("adam", torch.float32): 1e-5,
    ("sgd", torch.float32): 1e-6,
}


def _settings() -> list[tuple[str, torch.dtype, int, float]]:
    return list(itertools.product(OPTIMIZERS, (torch.float64, torch.float32), (1, 4), (0.0, 0.05)))


def _compare_all(rank: int, world_size: int) -> list[tuple[str, float, float]]:
    """(setting, difference, tolerance) of everything that is compared."""
    found = []
    for name, dtype, micro_batches, clip in _settings():
        model = build(Mlp, dtype=dtype)
        batches = make_batches(model, STEPS, micro_batches, world_size)
        reference = train_reference(build(Mlp, dtype=dtype), OPTIMIZERS[name], batches, clip=clip or None)
        engine = make_engine(
            model, config(micro_batches, gradient_clipping=clip), optimizer=OPTIMIZERS[name](model.parameters())
        )
        outcome = train(engine, batches, rank)
        setting = f"{name} {dtype} accumulation {micro_batches} clip {clip}"
        found.append((setting, relative_difference(outcome.weights, reference.weights), TOLERANCE[name, dtype]))
        norms = {"norms": torch.tensor(outcome.norms)}
        found.append((f"norms {setting}", relative_difference(norms, {"norms": torch.tensor(reference.norms)}), 1e-4))
        key = "exp_avg" if name == "adam" else "momentum_buffer"
        states = {n: each[key] for n, each in moments(engine).items()}
        wanted = {n: each[key] for n, each in reference.state.items()}
        found.append((f"{key} {setting}", relative_difference(states, wanted), 10 * TOLERANCE[name, dtype]))
        engine.destroy()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_weights_norms_and_moments_equal_one_process(world_size: int) -> None:
    for per_rank in run_ranks(_compare_all, world_size, timeout_seconds=120):
        assert [each for each in per_rank if not each[1] <= each[2]] == []


def _clips(rank: int, world_size: int) -> list[float]:
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, 3, 1, world_size)
    engine = make_engine(model, config(gradient_clipping=0.05), optimizer=SGD(model.parameters()))
    return train(engine, batches, rank).norms


def test_the_clipping_settings_above_really_clip() -> None:
    assert all(norm > 0.1 for norm in run_ranks(_clips, 2)[0])


MODELS = {
    "tied": TiedLm,
    "frozen part": PartlyFrozen,
    "parameter without elements": WithEmptyParameter,
    "unused parameter": WithUnusedParameter,
    "sparse embedding": SparseEmbedding,
}


def _model_difference(rank: int, world_size: int, model_class: Any, blocks: dict[str, Any]) -> float:
    model = build(model_class, dtype=torch.float64)
    batches = make_batches(model, 6, 2, world_size)
    # SGD without weight decay leaves an unused parameter alone, whether its gradient is absent or zero.
    reference = train_reference(build(model_class, dtype=torch.float64), functools.partial(torch.optim.SGD, lr=0.1), batches)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    outcome = train(make_engine(model, config(2, **blocks), optimizer=optimizer), batches, rank)
    return relative_difference(outcome.model_weights, reference.model_weights)


@pytest.mark.parametrize("name", MODELS)
def test_difficult_models_equal_one_process(name: str) -> None:
    assert max(run_ranks(_model_difference, 3, MODELS[name], {})) <= FP64_ROUNDING


@pytest.mark.parametrize(
    "blocks",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 2.0},
        {"sparse_gradients": True},
        {"communication_data_type": "fp32"},
        {"zero_optimization": {"overlap_comm": False}},
        {"zero_optimization": {"reduce_bucket_size": 50}},
    ],
    ids=str,
)
def test_settings_of_the_reduction_do_not_change_numbers(blocks: dict[str, Any]) -> None:
    # Prescaling and predividing by 3 round once more; fp32 on the wire rounds an fp64 gradient at 6e-8.
    tolerance = 1e-6 if "communication_data_type" in blocks else FP64_ROUNDING
    assert max(run_ranks(_model_difference, 3, TiedLm, blocks)) <= tolerance


def _sixteen_bit(rank: int, world_size: int, kind: str, blocks: dict[str, Any]) -> tuple[float, float]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    model = build(Mlp)
    batches = [
        [[tuple(t.to(dtype) for t in batch) for batch in micro] for micro in step]
        for step in make_batches(model, STEPS, 2, world_size)
    ]
    scale = 256.0 if kind == "fp16" else 1.0
    reference = train_reference(build(Mlp), ADAM, batches, dtype=dtype, loss_scale=scale)
    block = {"enabled": True, **({"loss_scale": scale} if kind == "fp16" else {})}
    engine = make_engine(model, config(2, **{kind: block}, **blocks), optimizer=ADAM(model.parameters()))
    outcome = train(engine, batches, rank)
    return (
        relative_difference(outcome.weights, reference.weights),
        relative_difference({n: w.float() for n, w in outcome.model_weights.items()}, reference.model_weights),
    )


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sixteen_bit_training_equals_a_reference_that_rounds_in_the_same_places(kind: str, world_size: int) -> None:
    for masters_off, weights_off in run_ranks(_sixteen_bit, world_size, kind, {}):
        # The mean over two ranks is exact up to one rounding, which both make; master arithmetic is fp32 on both sides.
        # A weight that lies between two 16-bit numbers may round the other way: one bf16 step is 2**-8.
        assert masters_off <= 1e-5
        assert weights_off <= 2**-8


def _autocast(rank: int, world_size: int) -> float:
    model = build(Mlp)
    batches = make_batches(model, 5, 1, world_size)
    reference_model = build(Mlp)
    plain_forward = reference_model.forward

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain_forward(*batch)

    reference_model.forward = forward  # type: ignore[method-assign]
    reference = train_reference(reference_model, SGD, batches)
    block = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    outcome = train(make_engine(model, config(**block), optimizer=SGD(model.parameters())), batches, rank)
    return relative_difference(outcome.weights, reference.weights)


def _low_precision_layers(rank: int, world_size: int, names: list[str]) -> tuple[float, float]:
    model = build(Mlp)
    batches = make_batches(model, 1, 1, world_size)
    reference = train_reference(build(Mlp), functools.partial(torch.optim.SGD, lr=1.0), batches)
    block = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": names}}
    engine = make_engine(model, config(**block), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    with torch.autocast("cpu", enabled=False):
        loss = engine.module(*batches[0][0][rank])  # full precision, so that only what travels is rounded
    engine.backward(loss)
    sent = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    engine.step()
    rounded = max((g - g.bfloat16().float()).abs().max().item() for g in sent.values())
    return rounded, relative_difference(masters(engine), reference.weights)


def test_gradients_of_named_layers_travel_in_the_autocast_dtype() -> None:
    for rounded, off in run_ranks(_low_precision_layers, 2, ["torch.nn.Linear"]):
        assert rounded == 0.0
        assert 0 < off <= 2**-7  # two roundings to bf16's 8 bits
    for rounded, off in run_ranks(_low_precision_layers, 2, ["torch.nn.Conv2d"]):
        assert rounded > 0.0
        assert off <= 1e-6


def test_torch_autocast_equals_plain_autocast() -> None:
    # The bf16 products are the same; gradients and weights are fp32, and only the mean over two ranks is summed otherwise.
    assert max(run_ranks(_autocast, 2)) <= 1e-6
