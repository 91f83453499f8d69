"""The ways in which people drive an engine: all of them give the gradient of the mean loss, or say what is wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import ArgumentError, UsageError
from tests.support.engines import config, make_engine, masters
from tests.support.models import Mlp, build, make_batches
from tests.support.ranks import run_ranks
from tests.support.reference import FP64_ROUNDING, relative_difference, train_reference

RATE = 0.1


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def fresh(world_size: int, micro_batches: int = 1, steps: int = 2) -> tuple[Mlp, Any, dict[str, Tensor]]:
    """A model, its batches, and the weights that plain training reaches."""
    model = build(Mlp, dtype=torch.float64)
    batches = make_batches(model, steps, micro_batches, world_size)
    reference = train_reference(build(Mlp, dtype=torch.float64), lambda ps: torch.optim.SGD(ps, lr=RATE), batches)
    return model, batches, reference.weights


def assert_same(engine: Any, wanted: dict[str, Tensor]) -> None:
    assert relative_difference(masters(engine), wanted) <= FP64_ROUNDING


def _plain_backward(rank: int, world_size: int) -> None:
    model, batches, wanted = fresh(world_size, 3)
    engine = make_engine(model, config(3), optimizer=sgd(model))
    for step in batches:
        for micro in step:
            engine(*micro[rank]).backward()
            engine.step()
    assert_same(engine, wanted)


def _divided_by_the_caller(rank: int, world_size: int) -> None:
    """As Accelerate does: the boundary is set, the loss is divided outside, step() only at the boundary."""
    model, batches, wanted = fresh(world_size, 4)
    engine = make_engine(model, config(4), optimizer=sgd(model))
    for step in batches:
        for number, micro in enumerate(step):
            engine.set_gradient_accumulation_boundary(is_boundary=number == 3)
            engine.backward(engine(*micro[rank]) / 4, scale_wrt_gas=False)
        engine.step()
    assert_same(engine, wanted)


def _several_backwards(rank: int, world_size: int) -> None:
    """Accumulation 1, and three backward calls before one step, without saying where the boundary is."""
    model, batches, wanted = fresh(world_size, 3)
    engine = make_engine(model, config(1), optimizer=sgd(model))
    for step in batches:
        for micro in step:
            engine.backward(engine(*micro[rank]) / 3)
        engine.step()
    assert_same(engine, wanted)


def _two_losses_of_one_graph(rank: int, world_size: int) -> None:
    model, batches, wanted = fresh(world_size)
    engine = make_engine(model, config(), optimizer=sgd(model))
    for step in batches:
        loss = engine(*step[0][rank])
        engine.backward(loss * 0.25, retain_graph=True)
        (loss * 0.75).backward()
        engine.step()
    assert_same(engine, wanted)


def _no_sync(rank: int, world_size: int) -> None:
    model, batches, wanted = fresh(world_size, 3)
    engine = make_engine(model, config(1), optimizer=sgd(model))
    for step in batches:
        with engine.no_sync():
            for micro in step[:-1]:
                engine.backward(engine(*micro[rank]) / 3)
        engine.backward(engine(*step[-1][rank]) / 3)
        engine.step()
    assert_same(engine, wanted)
    with engine.no_sync(), pytest.raises(ArgumentError, match="no_sync"):
        engine.step()


def _unmanaged(rank: int, world_size: int) -> None:
    model, batches, wanted = fresh(world_size, 3)
    engine = make_engine(model, config(1, managed_gradient_accumulation=False), optimizer=sgd(model))
    for step in batches:
        for micro in step:
            engine.backward(engine(*micro[rank]) / 3)
        engine.step()
    assert_same(engine, wanted)


def _coalesced(rank: int, world_size: int) -> None:
    model, batches, wanted = fresh(world_size, 2)
    engine = make_engine(model, config(1), optimizer=sgd(model))
    for step in batches:
        with engine.coalesce_grad_reduction():
            for micro in step:
                engine.backward(engine(*micro[rank]) / 2)
        engine.step()
    assert_same(engine, wanted)


def _zero_grad_by_the_user(rank: int, world_size: int) -> None:
    """The user drops gradients with the module's own zero_grad, which detaches them; nothing may be lost or kept."""
    model, batches, wanted = fresh(world_size)
    engine = make_engine(model, config(), optimizer=sgd(model))
    for step in batches:
        engine.backward(engine(*step[0][rank]) * 100)
        model.zero_grad()
        engine.backward(engine(*step[0][rank]))
        engine.step()
    assert_same(engine, wanted)


def _sum(rank: int, world_size: int) -> None:
    model, batches, _ = fresh(world_size)
    engine = make_engine(model, config(gradient_allreduce_op="sum"), optimizer=sgd(model))
    reference = build(Mlp, dtype=torch.float64)
    for step in batches:
        engine.backward(engine(*step[0][rank]))
        engine.step()
        for batch in step[0]:
            reference(*batch).backward()
        with torch.no_grad():
            for p in reference.parameters():
                assert p.grad is not None
                p.sub_(RATE * p.grad)
                p.grad = None
    assert_same(engine, {n: p.detach() for n, p in reference.named_parameters()})


def _evaluation_between(rank: int, world_size: int) -> None:
    model, batches, wanted = fresh(world_size)
    engine = make_engine(model, config(), optimizer=sgd(model))
    for step in batches:
        engine.eval()
        with torch.inference_mode():
            engine(*step[0][rank])
        engine.train()
        engine.backward(engine(*step[0][rank]))
        engine.step()
    assert_same(engine, wanted)


def _after_an_exception(rank: int, world_size: int) -> None:
    """A backward cut short (out of memory, say) and dropped does not disturb the next one."""

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, *__: Tensor) -> Tensor:
            raise MemoryError("as if out of memory")

    model, batches, wanted = fresh(world_size)
    engine = make_engine(model, config(), optimizer=sgd(model))
    for step in batches:
        for backward in (engine.backward, lambda loss: loss.backward()):
            inputs, targets = step[0][rank]
            hidden = Bomb.apply(torch.tanh(engine.module.first(inputs)))
            with pytest.raises(MemoryError):
                backward(nn.functional.mse_loss(engine.module.second(hidden), targets))
            engine.zero_grad()
        engine.backward(engine(*step[0][rank]))
        engine.step()
    assert_same(engine, wanted)


FLOWS = [
    _plain_backward,
    _divided_by_the_caller,
    _several_backwards,
    _two_losses_of_one_graph,
    _no_sync,
    _unmanaged,
    _coalesced,
    _zero_grad_by_the_user,
    _sum,
    _evaluation_between,
    _after_an_exception,
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__.strip("_"))
def test_every_way_to_drive_an_engine_gives_the_mean_gradient(flow: Any, world_size: int) -> None:
    run_ranks(flow, world_size)


class SharedUnderRecomputation(nn.Module):
    """One layer applied three times, recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.tail = nn.Linear(5, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=self.use_reentrant))
        return self.tail(x).square().mean()


def _recomputation(rank: int, world_size: int, use_reentrant: bool, plain: bool) -> float:
    model = build(SharedUnderRecomputation, use_reentrant, dtype=torch.float64)
    reference = build(SharedUnderRecomputation, False, dtype=torch.float64)
    inputs = [torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    engine = make_engine(model, config(), optimizer=sgd(model))
    optimizer = sgd(reference)
    for _ in range(3):
        loss = engine(inputs[rank].clone().requires_grad_())
        if plain:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        (sum(reference(x) for x in inputs) / world_size).backward()
        optimizer.step()
    return relative_difference(masters(engine), {n: p.detach() for n, p in reference.named_parameters()})


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_shared_under_recomputation_gets_its_whole_gradient(use_reentrant: bool, plain: bool) -> None:
    assert max(run_ranks(_recomputation, 2, use_reentrant, plain)) <= FP64_ROUNDING


class Branches(nn.Module):
    """A branch that a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.branch, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, with_branch: bool) -> Tensor:
        hidden = torch.tanh(self.a(x))
        return self.c(hidden + self.branch(x) if with_branch else hidden).square().mean()


def _unused_on_one_rank(rank: int, world_size: int) -> float:
    model, reference = build(Branches, dtype=torch.float64), build(Branches, dtype=torch.float64)
    inputs = [torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    engine = make_engine(model, config(zero_optimization={"reduce_bucket_size": 20}), optimizer=sgd(model))
    optimizer = sgd(reference)
    for step in range(3):
        engine.backward(engine(inputs[rank], (rank + step) % 2 == 0))
        engine.step()
        optimizer.zero_grad()
        (sum(reference(x, (r + step) % 2 == 0) for r, x in enumerate(inputs)) / world_size).backward()
        optimizer.step()
    return relative_difference(masters(engine), {n: p.detach() for n, p in reference.named_parameters()})


def test_a_parameter_that_one_rank_does_not_use_counts_as_zero_there() -> None:
    assert max(run_ranks(_unused_on_one_rank, 3)) <= FP64_ROUNDING


def _two_engines(rank: int, world_size: int, plain: bool) -> float:
    """One loss through two engines; each gets its exact gradient."""
    make = lambda: (nn.Linear(5, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64))  # noqa: E731
    torch.manual_seed(0)
    first, second = make()
    torch.manual_seed(0)
    references = make()
    inputs = [torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    one = make_engine(first, config(), optimizer=sgd(first))
    two = make_engine(second, config(), optimizer=sgd(second))
    optimizer = torch.optim.SGD([p for m in references for p in m.parameters()], lr=RATE)
    for _ in range(2):
        loss = two(torch.tanh(one(inputs[rank]))).square().mean()
        if plain:
            loss.backward()
        else:
            two.backward(loss)
        one.step()
        two.step()
        optimizer.zero_grad()
        (sum(references[1](torch.tanh(references[0](x))).square().mean() for x in inputs) / world_size).backward()
        optimizer.step()
    pairs = [(first, references[0]), (second, references[1])]
    return max(relative_difference(dict(m.state_dict()), dict(r.state_dict())) for m, r in pairs)


@pytest.mark.parametrize("plain", [False, True])
def test_two_engines_share_one_loss(plain: bool) -> None:
    assert max(run_ranks(_two_engines, 2, plain)) <= FP64_ROUNDING


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _nonfinite(rank: int, world_size: int, blocks: dict[str, Any], bad: float) -> tuple[list[str], int, float, bool]:
    model = build(Mlp)
    batch = make_batches(model, 1, 1, world_size)[0][0][rank]
    engine = make_engine(model, config(**blocks), optimizer=sgd(model))
    dtype = next(model.parameters()).dtype
    records = Records()
    logging.getLogger("DeepSpeed").addHandler(records)
    before = masters(engine)
    loss = engine(*(t.to(dtype) for t in batch)).float()
    engine.backward(loss * (bad if rank == 1 else 1.0))
    engine.step()
    unchanged = relative_difference(masters(engine), before)
    return records.lines, engine.skipped_steps, unchanged, engine.was_step_applied()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "blocks", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}], ids=str
)
def test_a_nonfinite_gradient_on_one_rank_skips_the_step_on_all(blocks: dict[str, Any], bad: float) -> None:
    results = run_ranks(_nonfinite, 3, blocks, bad)
    for _, skipped, difference, applied in results:
        assert (skipped, difference, applied) == (1, 0.0, False)
    (line,) = [text for text in results[0][0] if "skipped" in text]
    assert all(part in line for part in ("step 1", "second.bias", "rank 1"))
    assert "rank 0" not in line


def _keeps_going(rank: int, world_size: int) -> int:
    model = build(Mlp)
    batch = make_batches(model, 1, 1, world_size)[0][0][rank]
    engine = make_engine(model, config(bf16={"enabled": True, "check_overflow": False}), optimizer=sgd(model))
    loss = engine(*(t.bfloat16() for t in batch)).float()
    engine.backward(loss * (float("nan") if rank == 1 else 1.0))
    engine.step()
    return engine.skipped_steps


def test_bf16_steps_on_when_the_config_says_not_to_check() -> None:
    assert run_ranks(_keeps_going, 2) == [0, 0]


def _unscaled(rank: int, world_size: int) -> None:
    model = build(Mlp)
    batch = tuple(t.half() for t in make_batches(model, 1, 1, world_size)[0][0][rank])
    engine = make_engine(model, config(fp16={"enabled": True, "initial_scale_power": 4}), optimizer=sgd(model))
    with pytest.raises(UsageError, match=r"engine\.scale\(loss\)"):
        engine(*batch).backward()
    engine.zero_grad()
    engine.scale(engine(*batch)).backward()
    engine.step()
    assert engine.was_step_applied()
    other = build(Mlp)
    twin = make_engine(other, config(fp16={"enabled": True, "initial_scale_power": 4}), optimizer=sgd(other))
    twin.backward(twin(*batch))
    twin.step()
    assert relative_difference(masters(engine), masters(twin)) == 0.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_under_fp16_a_plain_backward_needs_a_scaled_loss(world_size: int) -> None:
    run_ranks(_unscaled, world_size)
