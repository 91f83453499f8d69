"""Element-wise optimizers give the same numbers on slices; the answer is checked against the optimizers themselves."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.optim import is_elementwise

OURS: list[Any] = [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb]
TORCHS: list[Any] = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]
# LBFGS needs a closure, SparseAdam sparse gradients: neither can be tried on dense slices.
TRIED = [*OURS, *(kind for kind in TORCHS if kind.__name__ not in ("LBFGS", "SparseAdam"))]


def steps_on_slices_agree(kind: Any) -> bool:
    """Whether 4 steps on a 6x4 matrix equal 4 steps on two row blocks of it."""
    whole = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    pieces = [torch.nn.Parameter(piece.detach().clone()) for piece in (whole[:1], whole[1:])]
    optimizers = kind([whole], lr=0.1), kind(pieces, lr=0.1)
    for step in range(4):
        grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(1 + step), dtype=torch.float64)
        whole.grad, pieces[0].grad, pieces[1].grad = grad, grad[:1].clone(), grad[1:].clone()
        for optimizer in optimizers:
            optimizer.step()
    return torch.allclose(whole, torch.cat(pieces), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", TRIED)
def test_the_answer_is_what_stepping_on_slices_shows(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    assert is_elementwise(optimizer) == steps_on_slices_agree(kind)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_be_tried_is_not_elementwise(kind: Any) -> None:
    assert not is_elementwise(kind([torch.nn.Parameter(torch.ones(2, 2))]))


def test_a_subclass_is_trusted_only_when_it_says_so() -> None:
    class Custom(torch.optim.SGD):
        pass

    class Declared(Custom):
        elementwise = True

    params = [torch.nn.Parameter(torch.ones(2))]
    assert not is_elementwise(Custom(params))
    assert is_elementwise(Declared(params))
