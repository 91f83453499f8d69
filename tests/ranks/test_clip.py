"""The gradient norm over model-parallel ranks, against the unsplit model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from deepspeed.optim import clip_grad_norm_
from tests.support.ranks import run_ranks


class ModelParallel:
    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> object:
        return dist.group.WORLD


def _gradients() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 2, generator=generator, dtype=torch.float64), torch.randn(
        3, generator=generator, dtype=torch.float64
    )


def _clip_split(rank: int, world_size: int, norm_type: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split_grad, shared_grad = _gradients()
    mine = split_grad.chunk(world_size)[rank]
    split, shared = torch.nn.Parameter(torch.zeros_like(mine)), torch.nn.Parameter(torch.zeros_like(shared_grad))
    split.model_parallel = True  # type: ignore[attr-defined]
    split.grad, shared.grad = mine.clone(), shared_grad.clone()
    norm = clip_grad_norm_([split, shared], 0.5, norm_type, ModelParallel())
    return norm, split.grad, shared.grad


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_pieces_are_added_and_shared_parameters_counted_once(norm_type: float) -> None:
    whole = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in _gradients()]
    for p, grad in zip(whole, _gradients(), strict=True):
        p.grad = grad
    want = torch.nn.utils.clip_grad_norm_(whole, 0.5, norm_type)
    results = run_ranks(_clip_split, 3, norm_type)
    # fp64: the sum of squares in another order and one product, each rounding at 1.1e-16.
    for norm, _, shared_grad in results:
        torch.testing.assert_close(norm, want, rtol=1e-14, atol=0)
        torch.testing.assert_close(shared_grad, whole[1].grad, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.cat([split for _, split, _ in results]), whole[0].grad, rtol=1e-14, atol=0)
