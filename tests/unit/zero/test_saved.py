"""`deepspeed.zero.saved`: autograd keeps places of weights, and is otherwise as careful as without hooks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed.errors import UsageError
from deepspeed.zero.gather import GatheredParameters
from deepspeed.zero.prefetch import GatherSettings
from deepspeed.zero.published import ZeroParamStatus
from tests.support.sharded import Sharded, gradients, shard
from tests.support.sharded_models import BLOCK_NUMEL, Gpt, Uses, inputs, tokens

NOTHING_KEPT = GatherSettings(max_reuse_numel=0)


def _forward(sharded: Sharded, *args: Any) -> Any:
    with sharded.coordinator.forward_scope():
        return sharded.model(*args)


def _twice(model: Any, x: Tensor) -> Tensor:
    return model.first(torch.tanh(model.first(torch.tanh(model.second(x))))).square().mean()


def test_autograd_keeps_no_gathered_buffer_alive() -> None:
    sharded = shard(Gpt(), NOTHING_KEPT, limit_numel=BLOCK_NUMEL)
    buffers: list[weakref.ref[Any]] = []
    sharded.model.h[1].register_forward_pre_hook(
        lambda m, a: buffers.extend(
            weakref.ref(b.untyped_storage()) for u in sharded.coordinator.pool.units for b in u.buffers
        )
    )
    loss = _forward(sharded, tokens())
    assert buffers
    assert all(ref() is None for ref in buffers)
    sharded.backward(loss)


def test_a_graph_that_is_dropped_frees_its_activations() -> None:
    sharded = shard(Uses(lambda m, x: keep(torch.exp(m.first(x))).sum()))
    seen: list[weakref.ref[Any]] = []

    def keep(tensor: Tensor) -> Tensor:
        seen.append(weakref.ref(tensor))
        return tensor

    gc.collect()
    gc.disable()
    try:
        loss = _forward(sharded, inputs())
        del loss
        assert seen[0]() is None
    finally:
        gc.enable()


def test_an_update_between_forward_and_backward_is_refused() -> None:
    sharded = shard(Uses(_twice), NOTHING_KEPT)
    sharded.backward(_forward(sharded, inputs()))
    loss = _forward(sharded, inputs())
    sharded.step()
    with pytest.raises(UsageError, match="modified by an inplace operation"):
        loss.backward()


def test_an_activation_changed_in_place_before_backward_is_refused_as_ever() -> None:
    sharded = shard(Uses(lambda m, x: hidden.append(m.first(x).exp()) or m.second(hidden[-1]).sum()))
    hidden: list[Tensor] = []
    loss = _forward(sharded, inputs())
    with torch.no_grad():
        hidden[-1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_saved_tensor_hooks_around_the_forward_still_see_activations() -> None:
    sharded = shard(Uses(_twice), NOTHING_KEPT)
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _forward(sharded, inputs())
    assert packed
    assert torch.Size([8, 8]) not in packed  # weights are not theirs
    sharded.backward(loss)
    with torch.autograd.graph.save_on_cpu():
        loss = _forward(sharded, inputs())
    sharded.backward(loss)


def test_backward_gathers_what_no_hook_has() -> None:
    sharded = shard(Uses(_twice), NOTHING_KEPT, limit_numel=1)
    loss = _forward(sharded, inputs())
    want = torch.autograd.grad(loss, list(sharded.model.parameters()), retain_graph=True)
    sharded.coordinator.backward_over()
    for unit in sharded.coordinator.pool.units:  # as if every hook on an output had been lost
        unit.externals.clear()
    sharded.coordinator.hooks.remove()
    sharded.coordinator.before_backward = lambda call: None  # type: ignore[method-assign]
    got = torch.autograd.grad(loss, list(sharded.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_second_backward_through_the_same_graph_gathers_again() -> None:
    sharded = shard(Uses(_twice), NOTHING_KEPT, limit_numel=1)
    loss = _forward(sharded, inputs())
    sharded.backward(loss, retain_graph=True)
    once = {name: grad.clone() for name, grad in gradients(sharded.model).items()}
    sharded.backward(loss)
    for name, grad in gradients(sharded.model).items():
        assert torch.equal(grad, 2 * once[name])  # doubling is exact


def test_sparse_tensors_are_saved_as_they_are() -> None:
    sharded = shard(Uses(lambda m, x: torch.sparse.mm(torch.eye(3).to_sparse(), m.first(x)).sum()), NOTHING_KEPT)
    sharded.backward(_forward(sharded, inputs()))
    assert torch.allclose(sharded.model.first.bias.grad, torch.full((8,), 3.0))


def test_a_weight_seen_as_another_dtype_comes_back_so() -> None:
    class AsIntegers(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight.view(torch.int32))
            return x * weight.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (integers,) = ctx.saved_tensors
            assert integers.dtype == torch.int32
            return grad * integers.view(torch.float32).sum(), torch.zeros(8, 8)

    sharded = shard(Uses(lambda m, x: AsIntegers.apply(m.first(x), m.second.weight).sum()), NOTHING_KEPT, limit_numel=1)
    total = sharded.whole()["second.weight"].sum()
    sharded.backward(_forward(sharded, inputs()))
    assert torch.allclose(sharded.model.first.bias.grad, 3 * total.expand(8))


class _Asks(torch.autograd.Function):
    """A linear layer that asks what it saved whether that is whole, as fused heads of clients do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        assert type(weight * 2) is Tensor
        assert weight.shape == (8, 8)
        return grad @ weight, grad.t() @ x


def _asked(model: Any, x: Tensor) -> Tensor:
    return _Asks.apply(torch.tanh(model.first(x)), model.second.weight).square().sum()


def _asked_in_a_block(model: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.first(x))
    with GatheredParameters([model.second.weight]):
        return _Asks.apply(hidden, model.second.weight).square().sum()


@pytest.mark.parametrize("forward", [_asked, _asked_in_a_block])
def test_a_function_may_ask_the_parameter_that_it_saved_whether_it_is_whole(forward: Any) -> None:
    sharded = shard(Uses(forward), NOTHING_KEPT, limit_numel=1)
    plain = Uses(lambda m, x: F.linear(torch.tanh(m.first(x)), m.second.weight).square().sum())
    plain.load_state_dict(sharded.whole())
    plain(inputs()).backward()
    sharded.backward(_forward(sharded, inputs()))
    for name, param in plain.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(gradients(sharded.model)[name], param.grad, rtol=1e-6, atol=1e-6)  # fp32, 8 terms


def test_the_scope_ends_with_the_hooks_that_were_there() -> None:
    sharded = shard(nn.Linear(8, 8))
    for _ in range(2):
        with sharded.coordinator.forward_scope(), sharded.coordinator.forward_scope():
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert F.linear(torch.ones(1), torch.ones(1, 1)).item() == 1
