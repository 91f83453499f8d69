"""Tensor-parallel ranks that take their part of the tokens and put the results together again."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import ArgumentError
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.topology import groups
from deepspeed.topology.mesh import ParallelMesh
from tests.support.ranks import run_ranks


def _parts(rank: int, world_size: int) -> None:
    whole = torch.arange(24.0).view(2, 6, 2).requires_grad_()
    assert drop_tokens(whole) is whole, "before there is a mesh"
    groups.set_current(ParallelMesh.build(tensor=3))
    part = drop_tokens(whole, dim=1)
    assert torch.equal(part, whole[:, 2 * rank : 2 * rank + 2])
    again = gather_tokens(part * (rank + 1), dim=1)
    factor = torch.tensor([1.0, 1, 2, 2, 3, 3])[:, None]
    assert torch.equal(again, whole * factor)
    (again * torch.arange(12.0).view(6, 2)).sum().backward()
    assert whole.grad is not None
    # each rank's part of the gradient, gathered
    assert torch.equal(whole.grad, (factor * torch.arange(12.0).view(6, 2)).expand(2, 6, 2))
    with pytest.raises(ArgumentError, match=r"3 tensor-parallel ranks: dimension 0 has 2 elements.*Pad"):
        drop_tokens(whole)


def test_tokens_are_dropped_and_gathered_with_their_gradients() -> None:
    run_ranks(_parts, 3)


def _one(rank: int, world_size: int) -> None:
    groups.set_current(ParallelMesh.build())
    x = torch.ones(3)
    assert drop_tokens(x) is x
    assert gather_tokens(x) is x


def test_without_tensor_parallelism_nothing_moves() -> None:
    run_ranks(_one, 2)
