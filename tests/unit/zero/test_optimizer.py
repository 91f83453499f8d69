"""One update: in the right units, clipped as torch clips, skipped whole, and never made behind the engine's back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.algorithms import LocalReducer
from deepspeed.errors import UsageError
from deepspeed.optim import is_elementwise
from deepspeed.precision.loss_scaler import NullScaler
from deepspeed.zero.gradients import ViewGradients, WholeGradients
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.optimizer import ZeroOptimizer
from deepspeed.zero.reducer import GradientReducer
from tests.support.fake_reducers import pretend_axis
from tests.support.flat_groups import CPU, flat_group

X = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)


def layer() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 4).double()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def wrapped(
    module: nn.Module, client: torch.optim.Optimizer, *, keeps: bool = True, divisor: int = 1, **options: Any
) -> Any:
    flat = flat_group(module, dtype=torch.float64, master=torch.float64)
    buffer = LocalReducer(flat.layout.numel, torch.float64, CPU)
    flat.attach_gradients(ViewGradients(flat, buffer) if keeps else WholeGradients(flat, buffer, is_scattered=False))
    reducer = GradientReducer([flat], pretend_axis(1), is_boundary=lambda: True)
    master = MasterWeights([flat], client, is_elementwise=is_elementwise(client))
    return ZeroOptimizer(master, reducer, NullScaler(), divisor=lambda: divisor, **options)


def backward(module: nn.Module, times: float = 1.0) -> None:
    (module(X).square().sum() * times).backward()


def assert_same(got: nn.Module, want: nn.Module) -> None:
    for ours, theirs in zip(got.parameters(), want.parameters(), strict=True):  # fp64: a few roundings of 1e-16
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_updates_are_those_of_plain_torch(keeps: bool, clip: float, micro_batches: int) -> None:
    ours, theirs = layer(), layer()
    optimizer = wrapped(ours, adam(ours.parameters()), keeps=keeps, divisor=micro_batches, clip=clip)
    plain = adam(theirs.parameters())
    for number in range(1, 4):
        for micro in range(micro_batches):
            backward(ours, 1.0 + micro)
            backward(theirs, (1.0 + micro) / micro_batches)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or 1e9)
        plain.step()
        plain.zero_grad()
        optimizer.update(number)
        assert optimizer.global_norm == pytest.approx(norm.item(), rel=1e-12)
        assert not optimizer.overflow
        assert_same(ours, theirs)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_non_finite_gradient_skips_the_update_and_leaves_no_trace(keeps: bool) -> None:
    ours = layer()
    optimizer = wrapped(ours, adam(ours.parameters()), keeps=keeps)
    before = copy.deepcopy(ours.state_dict())
    backward(ours, float("inf"))
    optimizer.update(1)
    assert optimizer.overflow
    assert optimizer.check_overflow()
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    theirs = copy.deepcopy(ours)
    plain = adam(theirs.parameters())
    theirs.zero_grad()
    backward(theirs)
    plain.step()
    backward(ours)
    optimizer.update(2)
    assert not optimizer.overflow
    assert_same(ours, theirs)


@pytest.mark.parametrize("computes_norm", [True, False])
@pytest.mark.parametrize("skips_nonfinite", [True, False])
def test_an_update_that_a_client_skips_leaves_no_trace_and_the_next_one_is_made(
    computes_norm: bool, skips_nonfinite: bool
) -> None:
    ours, theirs = layer(), layer()
    optimizer = wrapped(
        ours, adam(ours.parameters()), clip=0.5, computes_norm=computes_norm, skips_nonfinite=skips_nonfinite
    )
    before = copy.deepcopy(ours.state_dict())
    backward(ours, 7.0)
    optimizer.skip_step = True
    outcome = optimizer.update(1)
    assert optimizer.overflow
    assert outcome.is_requested
    assert not optimizer.check_overflow()
    assert not optimizer.skip_step
    assert optimizer.global_norm is None
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    plain = adam(theirs.parameters())
    backward(theirs)
    if computes_norm:
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    plain.step()
    backward(ours)
    optimizer.update(2)
    assert not optimizer.overflow
    assert_same(ours, theirs)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("bad", [1.0, float("inf"), float("nan")])
def test_a_look_at_the_gradients_before_an_update_changes_nothing_of_it(keeps: bool, bad: float) -> None:
    ours, theirs = layer(), layer()
    optimizer, other = (wrapped(each, adam(each.parameters()), keeps=keeps) for each in (ours, theirs))
    for number in (1, 2):
        for module in (ours, theirs):
            backward(module, bad if number == 2 else 1.0)
        assert not optimizer.check_overflow()  # of the last update
        assert [optimizer.check_overflow(external=True) for _ in range(2)] == [number == 2 and bad != 1.0] * 2
        optimizer.update(number)
        other.update(number)
        assert optimizer.check_overflow() == optimizer.overflow == other.overflow
        assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_without_the_norm_non_finite_gradients_are_still_noticed() -> None:
    ours = layer()
    optimizer = wrapped(ours, adam(ours.parameters()), computes_norm=False)
    for number, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
        backward(ours, bad)
        optimizer.update(number)
        assert optimizer.overflow
        assert optimizer.check_overflow()  # a sum of -infinity too is none that a client asked for
        assert optimizer.global_norm is None
    backward(ours)
    optimizer.update(2)
    assert not optimizer.overflow


@pytest.mark.parametrize("keeps", [True, False])
def test_dropped_gradients_count_for_nothing(keeps: bool) -> None:
    ours, theirs = layer(), layer()
    optimizer = wrapped(ours, adam(ours.parameters()), keeps=keeps)
    backward(ours, 7.0)
    optimizer.zero_grad()
    backward(ours)
    optimizer.update(1)
    backward(theirs)
    adam(theirs.parameters()).step()
    assert_same(ours, theirs)


def test_an_update_without_gradients_is_one_with_zeros() -> None:
    ours, theirs = layer(), layer()
    optimizer = wrapped(ours, adam(ours.parameters()), keeps=False)
    optimizer.update(1)
    assert optimizer.global_norm == 0.0
    plain = adam(theirs.parameters())
    for p in theirs.parameters():
        p.grad = torch.zeros_like(p)
    plain.step()
    assert_same(ours, theirs)


def test_edits_of_weights_between_updates_are_what_the_next_one_starts_from() -> None:
    ours, theirs = layer(), layer()
    optimizer, plain = wrapped(ours, adam(ours.parameters())), adam(theirs.parameters())
    for number in range(1, 4):
        for module in (ours, theirs):
            with torch.no_grad():
                module.weight.mul_(0.5)
            module.bias.data = module.bias.detach() * 2
            backward(module)
        optimizer.update(number)
        plain.step()
        plain.zero_grad()
        assert_same(ours, theirs)


@pytest.mark.parametrize("call", ["step", "add_param_group"])
def test_neither_it_nor_the_wrapped_optimizer_steps_or_grows_behind_the_engines_back(call: str) -> None:
    module = layer()
    client = adam(module.parameters())
    optimizer = wrapped(module, client)
    arguments = [{}] if call == "add_param_group" else []
    for each in (optimizer, client):
        with pytest.raises(UsageError, match="engine"):
            getattr(each, call)(*arguments)
    optimizer.release()
    backward(module)
    client.step()
    client.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(client.param_groups) == 2


def test_rates_are_read_and_written_through_it_and_unknown_names_are_the_wrapped_ones() -> None:
    module = layer()
    client = adam(module.parameters())
    client.note = "mine"  # type: ignore[attr-defined]
    optimizer = wrapped(module, client)
    optimizer.param_groups[0]["lr"] = 0.7
    assert client.param_groups[0]["lr"] == 0.7
    assert optimizer.note == "mine"
    assert optimizer.defaults is client.defaults
    assert isinstance(optimizer, torch.optim.Optimizer)
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_name
