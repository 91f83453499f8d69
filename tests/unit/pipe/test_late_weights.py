"""Gradients of weights that come later are the same to the last bit, and hooks see them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.pipe.late_weights import LateWeights


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.LayerNorm(7), nn.Linear(7, 3))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (5,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_have_autograds_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    plain, split = _model().to(dtype), _model().to(dtype)
    plain(x).sum().backward()
    wanted, x.grad = x.grad, None
    late = LateWeights()
    with late:
        out = split(x).sum()
    out.backward()
    assert wanted is not None
    assert x.grad is not None
    assert torch.equal(x.grad, wanted)
    linear = [module for module in split if isinstance(module, nn.Linear)]
    assert all(param.grad is None for module in linear for param in module.parameters())
    late.pay()
    assert all(torch.equal(one, other) for one, other in zip(_gradients(split), _gradients(plain), strict=True))


def test_hooks_see_each_gradient_once_it_is_paid() -> None:
    model, late, seen = _model(), LateWeights(), []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    with late:
        model(torch.ones(2, 5, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["3.bias", "3.weight"]
    late.pay()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_recomputed_layers_are_left_to_autograd(needs_gradient: bool) -> None:
    plain, split, late = _model(), _model(), LateWeights()
    x = torch.randn(3, 5, requires_grad=needs_gradient)
    plain(x).sum().backward()
    with late:
        out = checkpoint(split, x, use_reentrant=False).sum()
    out.backward()
    assert all(torch.equal(one, other) for one, other in zip(_gradients(split), _gradients(plain), strict=True))
    late.pay()


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_frozen_layers_and_inputs_without_gradient(needs_gradient: bool) -> None:
    plain, split, late = _model(), _model(), LateWeights()
    for model in (plain, split):
        model.get_submodule("2").requires_grad_(False)
        model.get_submodule("4").bias.requires_grad_(False)  # type: ignore[union-attr]
    x = torch.randn(3, 5, requires_grad=needs_gradient)
    plain(x).sum().backward()
    with late:
        split(x).sum().backward()
    late.pay()
    assert all(torch.equal(one, other) for one, other in zip(_gradients(split), _gradients(plain), strict=True))


def test_what_is_no_trained_leaf_is_left_to_autograd() -> None:
    weight, late = nn.Parameter(torch.ones(3, 5)), LateWeights()
    with late:
        torch.nn.functional.linear(torch.ones(2, 5, requires_grad=True), weight * 2).sum().backward()
    assert weight.grad is not None
    late.pay()


def test_a_weight_used_twice_gets_both() -> None:
    layer, late = nn.Linear(4, 4), LateWeights()
    with late:
        layer(layer(torch.ones(2, 4, requires_grad=True))).sum().backward()
    late.pay()
    got, layer.weight.grad = layer.weight.grad, None
    layer(layer(torch.ones(2, 4, requires_grad=True))).sum().backward()
    assert got is not None
    torch.testing.assert_close(got, layer.weight.grad)


def test_what_was_paid_is_let_go() -> None:
    """Inputs of layers hold the graph, and the graph what is owed: memory that would stay for ever, batch after batch."""
    late, kept = LateWeights(), []
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model[0].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    with late:
        out = model(torch.randn(2, 5, requires_grad=True)).sum()
    out.backward()
    late.pay()
    del out
    gc.collect()
    assert [each() for each in kept] == [None]
