"""Collectives with gradients: equal to one process that computes what all ranks do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm import differentiable as moving
from deepspeed.errors import ArgumentError
from tests.support.ranks import run_ranks

_WIDTHS = (2, 0, 3)


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _all_functions(rank: int, world_size: int) -> None:
    _copy_and_reduce(rank)
    for dim in (0, -1):
        _split_and_gather(rank, dim)
        _scatter_and_all_gather(rank, dim)
    _twice(rank)


def _copy_and_reduce(rank: int) -> None:
    factors = [_numbers(5, seed=each) for each in range(3)]
    x = _numbers(5, seed=9).requires_grad_()
    total = moving.reduce(moving.copy(x) * factors[rank])
    torch.testing.assert_close(total, x * sum(factors), rtol=0, atol=1e-14)
    (total * factors[0]).sum().backward()
    torch.testing.assert_close(x.grad, sum(factors) * factors[0], rtol=0, atol=1e-14)


def _split_and_gather(rank: int, dim: int) -> None:
    """All ranks go on alike: one rank's loss is everybody's."""
    shape = (5, 2) if dim == 0 else (2, 5)
    weights = _numbers(*shape, seed=1)
    whole = _numbers(*shape, seed=2).requires_grad_()
    part = moving.split(whole, dim, widths=_WIDTHS)
    assert part.shape[dim] == _WIDTHS[rank]
    again = moving.gather(part * (rank + 1), dim, widths=_WIDTHS)
    factor = torch.tensor([1.0, 1, 3, 3, 3], dtype=torch.float64)
    factor = factor[:, None] if dim == 0 else factor
    assert torch.equal(again, whole * factor)
    (again * weights).sum().backward()
    assert torch.equal(whole.grad, weights * factor)


def _scatter_and_all_gather(rank: int, dim: int) -> None:
    """Each rank uses the whole for a loss of its own: the gradient is that of the sum."""
    shape = (5, 2) if dim == 0 else (2, 5)
    weights = [_numbers(*shape, seed=each) for each in range(3)]
    x = _numbers(*shape, seed=5 + rank).requires_grad_()
    part = moving.reduce_scatter(x, dim, widths=_WIDTHS)
    total = moving.all_gather(part, dim, widths=_WIDTHS)
    torch.testing.assert_close(total, sum(_numbers(*shape, seed=5 + each) for each in range(3)), rtol=0, atol=1e-14)
    (total * weights[rank]).sum().backward()
    torch.testing.assert_close(x.grad, sum(weights), rtol=0, atol=1e-14)


def _twice(rank: int) -> None:
    x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    cube = moving.reduce(moving.copy(x) ** 3 * (rank + 1))  # 6 x^3
    (first,) = torch.autograd.grad(cube.sum(), x, create_graph=True)
    assert first.item() == 18 * 4
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.item() == 36 * 2


def test_values_and_gradients_are_those_of_one_process_with_uneven_and_empty_parts() -> None:
    run_ranks(_all_functions, 3)


def _refused(rank: int, world_size: int) -> None:
    x = torch.ones(3)
    with pytest.raises(ArgumentError, match=r"dimension 0 has 3 elements, which 2 ranks do not divide. Give the widths"):
        moving.split(x, 0)
    with pytest.raises(ArgumentError, match=r"widths \(1, 1\).*dimension 0 with 3 elements.*add up"):
        moving.reduce_scatter(x, 0, widths=(1, 1))
    with pytest.raises(ArgumentError, match=rf"widths \(1, 2\).*group rank {rank} has 3 elements.*at its place"):
        moving.gather(x, 0, widths=(1, 2))
    alone = comm.new_group([rank], use_local_synchronization=True)
    assert moving.copy(x, alone) is moving.reduce(x, alone) is moving.split(x, 0, alone) is moving.gather(x, 0, alone) is x
    assert moving.reduce_scatter(x, 0, alone) is moving.all_gather(x, 0, alone) is x


def test_widths_that_do_not_fit_are_refused_and_one_rank_moves_nothing() -> None:
    run_ranks(_refused, 2)
