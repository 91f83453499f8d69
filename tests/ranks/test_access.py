"""A client reads and writes the weight, gradient and optimizer state of a parameter in full precision."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed import utils
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.zero import master
from tests.support.engines import config, make_engine, model_weights, zero
from tests.support.models import Mlp, PartlyFrozen, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference

ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, accumulated in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
}


SMALL = {"reduce_bucket_size": 100, "stage3_param_persistence_threshold": 20}
STAGES = [(0, 1), (0, 2), (1, 3), (2, 2), (3, 2)]
"""ZeRO stages and numbers of ranks."""


def _engine(precision: str, model: Mlp, stage: int = 0) -> Any:
    master.SUB_GROUP_NUMEL["cpu"] = 64  # this process ends with the test: state of one parameter lies in several slices
    blocks = {**PRECISIONS[precision], **zero(stage, **SMALL)}
    return make_engine(model, config(2, **blocks), optimizer=ADAM(model.parameters()))


def _micro_batches(model: Mlp, world_size: int) -> list[Any]:
    dtype = model.first.weight.dtype
    batches = make_batches(model, 1, 2, world_size)[0]
    return [[tuple(t.to(dtype) for t in batch) for batch in micro] for micro in batches]


def _mean_gradients(weights: dict[str, Tensor], micros: list[Any], world_size: int) -> dict[str, Tensor]:
    """Plain torch's gradient of the mean loss over all micro-batches and ranks."""
    twin = Mlp().double()
    twin.load_state_dict(weights)
    for micro in micros:
        for batch in micro:
            (twin(*(t.double() for t in batch)) / len(micros) / world_size).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def _reads(rank: int, world_size: int, precision: str, stage: int) -> None:
    model = build(Mlp, dtype=torch.float64 if precision == "fp64" else torch.float32)
    engine = _engine(precision, model, stage)
    weight = model.first.weight
    micros = _micro_batches(model, world_size)
    wanted = _mean_gradients(model_weights(engine), micros, world_size)
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
    for number, micro in enumerate(micros):
        engine.backward(engine(*micro[rank]))
        if number == 0:
            assert world_size == 1 or utils.safe_get_full_grad(weight) is None  # not reduced yet
            engine.step()
    gradients = {name: utils.safe_get_full_grad(p) for name, p in model.named_parameters()}
    # Gradients of two micro-batches of a bf16 model: eight bits each, through two layers.
    assert relative_difference(gradients, wanted) <= (FP64_ROUNDING if precision == "fp64" else 0.03)  # type: ignore[arg-type]
    engine.step()
    of_model = model_weights(engine)
    for name, param in model.named_parameters():
        got = utils.safe_get_full_fp32_param(param)
        assert got is not None
        assert got.dtype == (torch.float64 if precision == "fp64" else torch.float32)
        assert torch.equal(got.to(weight.dtype), of_model[name])
    moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment is not None
    assert moment.shape == of_model["first.weight"].shape
    torch.testing.assert_close(moment, gradients["first.weight"] * 0.1)  # Adam's first moment starts at 0.1 x gradient
    assert utils.safe_get_full_optimizer_state(weight, "no such key") is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_read_are_the_values_of_plain_torch(precision: str) -> None:
    for stage, world_size in STAGES:
        run_ranks(_reads, world_size, precision, stage)


def _writes(rank: int, world_size: int, precision: str, stage: int) -> None:
    model = build(Mlp, dtype=torch.float64 if precision == "fp64" else torch.float32)
    shapes = {p: p.shape for p in model.parameters()}
    engine = _engine(precision, model, stage)
    micros = _micro_batches(model, world_size)
    for _ in range(2):
        for micro in micros:
            engine.backward(engine(*micro[rank]))
            if engine.is_gradient_accumulation_boundary():
                for p, shape in shapes.items():
                    utils.safe_set_full_fp32_param(p, torch.full(shape, 0.5))
                utils.safe_update_full_grad_vectorized(model.parameters(), lambda grad, p: torch.full(shapes[p], 3.0))
            engine.step()
        for p, shape in shapes.items():
            got = utils.safe_get_full_fp32_param(p)
            # Adam divides the gradient by its own magnitude: from 0.5 down by the rate, after 1% x rate of decay.
            torch.testing.assert_close(got, torch.full_like(got, 0.5 * (1 - 1e-4) - 1e-2))  # type: ignore[arg-type]
            moment = torch.arange(float(shape.numel())).view(shape)
            utils.safe_set_full_optimizer_state(p, moment, "exp_avg")
            assert torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg").float(), moment)  # type: ignore[union-attr]
            utils.safe_set_full_optimizer_state(p, torch.full(shape, 0.3), "exp_avg")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_written_decides_the_next_step(precision: str) -> None:
    for stage, world_size in STAGES:
        run_ranks(_writes, world_size, precision, stage)


def _parts(rank: int, world_size: int, stage: int) -> Any:
    model = build(Mlp)
    engine = _engine("bf16", model, stage)
    first, second = _micro_batches(model, world_size)
    for micro in (first, second, first):
        engine.backward(engine(*micro[rank]))
        engine.step()
    engine.backward(engine(*second[rank]))
    read = {}
    for name, p in model.named_parameters():
        full = (
            utils.safe_get_full_fp32_param(p),
            utils.safe_get_full_grad(p),
            utils.safe_get_full_optimizer_state(p, "exp_avg"),
        )
        local = (
            utils.safe_get_local_fp32_param(p),
            utils.safe_get_local_grad(p),
            utils.safe_get_local_optimizer_state(p, "exp_avg"),
        )
        read[name] = full, local
        for value, write in zip(
            local,
            (
                utils.safe_set_local_fp32_param,
                utils.safe_set_local_grad,
                lambda p, v: utils.safe_set_local_optimizer_state(p, v, "exp_avg"),
            ),
            strict=True,
        ):
            if value is not None:
                write(p, value + 1)
        for before, after in zip(
            full,
            (
                utils.safe_get_full_fp32_param(p),
                utils.safe_get_full_grad(p),
                utils.safe_get_full_optimizer_state(p, "exp_avg"),
            ),
            strict=True,
        ):
            torch.testing.assert_close(after, before + 1, rtol=1e-2, atol=1e-2)  # a gradient is kept in bf16
    of_model = model_weights(engine)
    for name, p in model.named_parameters():
        assert torch.equal(of_model[name].float(), utils.safe_get_full_fp32_param(p).bfloat16().float())  # type: ignore[union-attr]
    engine.step()
    return read


@pytest.mark.parametrize(("stage", "world_size"), STAGES)
def test_the_parts_of_all_ranks_are_the_whole_and_what_is_written_to_them_is_too(stage: int, world_size: int) -> None:
    of_ranks = run_ranks(_parts, world_size, stage)
    for name, (full, _) in of_ranks[0].items():
        for kind, whole in enumerate(full):
            parts = [of[name][1][kind] for of in of_ranks]
            assert all(torch.equal(of[name][0][kind], whole) for of in of_ranks)
            if stage == 0:
                assert all(torch.equal(part, whole.view(-1)) for part in parts)
            else:
                assert torch.equal(torch.cat([part for part in parts if part is not None]), whole.view(-1))


def _large(rank: int, world_size: int) -> None:
    model = nn.Linear(1, 2**24 + 1, bias=False)  # more elements than fp32 can count
    engine = make_engine(model, config(1), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    engine.backward(engine(torch.ones(1, 1)).mean())
    engine.step()
    assert utils.safe_get_full_optimizer_state(model.weight, "momentum_buffer") is not None


def test_state_of_a_large_parameter_is_counted_exactly() -> None:
    run_ranks(_large, 1)


def _strangers(rank: int, world_size: int) -> None:
    model = build(PartlyFrozen)
    engine = make_engine(model, config(), optimizer=ADAM([p for p in model.parameters() if p.requires_grad]))
    trained = model.second.weight
    for stranger in (model.first.weight, nn.Parameter(torch.ones(2))):
        assert utils.safe_get_full_fp32_param(stranger) is None
        assert utils.safe_get_full_grad(stranger) is None
        assert utils.safe_get_full_optimizer_state(stranger, "exp_avg") is None
        for write in (utils.safe_set_full_fp32_param, utils.safe_set_full_grad):
            with pytest.raises(UsageError, match="no engine trains"):
                write(stranger, torch.ones_like(stranger))
    with pytest.raises(ArgumentError, match="shape"):
        utils.safe_set_full_fp32_param(trained, torch.ones(1))
    with pytest.raises(UsageError, match="no such state"):
        utils.safe_set_full_optimizer_state(trained, torch.ones_like(trained), "exp_avg")
    engine.destroy()
    assert utils.safe_get_full_fp32_param(trained) is None


def test_a_parameter_that_no_engine_trains_has_nothing_to_read_or_write() -> None:
    run_ranks(_strangers, 1)
