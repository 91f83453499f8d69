"""Norms and clipping against torch, and where values are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.optim import clip_grad_norm_, get_global_norm, get_grad_norm


def with_gradients(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(4, 3), (5,), (), (0,)]]
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(dtype)
    return [*params, torch.nn.Parameter(torch.zeros(2))]  # the last has no gradient


@pytest.mark.parametrize("norm_type", [2, 1, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e3, 0.0])
def test_clipping_equals_torchs(norm_type: float, max_norm: float) -> None:
    ours, theirs = with_gradients(torch.float64), with_gradients(torch.float64)
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    filled = [p for p in theirs if p.numel()]  # torch has no largest magnitude of nothing
    want = torch.nn.utils.clip_grad_norm_(filled, max_norm, norm_type)
    # fp64: the same formula, with the sum of powers in another order, each operation rounding at 1.1e-16.
    torch.testing.assert_close(norm, want, rtol=1e-14, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-14, atol=0)


@given(scale=st.floats(1e-3, 1e3), max_norm=st.floats(1e-3, 1e3))
def test_the_norm_afterwards_is_at_most_the_limit(scale: float, max_norm: float) -> None:
    params = with_gradients(torch.float64, scale)
    before = clip_grad_norm_(params, max_norm).item()
    assert get_grad_norm(params).item() <= min(before, max_norm) * (1 + 1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_gradients_are_reported_and_left_alone(bad: float) -> None:
    params = with_gradients()
    params[1].grad[2] = bad
    kept = [p.grad.clone() for p in params if p.grad is not None]
    assert not math.isfinite(clip_grad_norm_(params, 1.0))
    for p, want in zip(params, kept, strict=False):
        assert torch.equal(p.grad.nan_to_num(7, 8, 9), want.nan_to_num(7, 8, 9))


def test_16_bit_gradients_are_summed_in_float32() -> None:
    p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.float16))
    p.grad = torch.full((4096,), 100.0, dtype=torch.float16)  # sum of squares 4.1e7: beyond fp16's 65504
    assert get_grad_norm(p) == 6400.0


def test_a_sparse_gradient_counts_its_values_once() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    dense = table.weight.grad.to_dense()
    assert clip_grad_norm_([table.weight], 1.0) == dense.norm()
    torch.testing.assert_close(table.weight.grad.to_dense(), dense / dense.norm(), rtol=1e-6, atol=0)


def test_one_parameter_may_be_given_without_a_list() -> None:
    (p, *_) = with_gradients()
    assert clip_grad_norm_(p, 1e9) == p.grad.norm()


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == 0
    assert get_grad_norm([]) == 0


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm=-1.0, but a number of at least 0"):
        clip_grad_norm_(with_gradients(), -1.0)


def test_norms_of_parts_give_the_norm_of_the_whole() -> None:
    assert get_global_norm([3.0, torch.tensor(4.0)]) == 5.0
    assert get_global_norm([]) == 0.0
    assert math.isinf(get_global_norm([1.0, math.inf]))
