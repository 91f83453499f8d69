"""The walk gives the optimizer what it needs to compute the numbers of plain PyTorch, and gives it back whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.comm.algorithms import LocalReducer
from deepspeed.optim import is_elementwise
from deepspeed.zero import master as master_module
from deepspeed.zero.flat import FlatGroup
from deepspeed.zero.gradients import ViewGradients
from deepspeed.zero.master import MasterWeights
from deepspeed.zero.state_io import carry_state, hand_back
from tests.support.flat_groups import CPU, flat_group

SHAPES = ((5, 3), (4,), (), (2, 7))


class Global(torch.optim.Optimizer):
    """Not element-wise in two ways: it counts its calls, and divides by the norm of the whole group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            norm = torch.stack([p.grad.square().sum() for p in group["params"]]).sum().sqrt()
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"] / group["calls"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "counts and looks at the group": Global,
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adafactor, whole matrices": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def _gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _flat(params: list[nn.Parameter]) -> FlatGroup:
    named = [(str(order), param) for order, param in enumerate(params)]
    flat = flat_group(named, dtype=torch.float64, master=torch.float64, bucket_numel=16)
    flat.attach_gradients(ViewGradients(flat, LocalReducer(flat.layout.numel, torch.float64, CPU)))
    return flat


def _walk(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range, factor: float) -> MasterWeights:
    client_state = {id(p): state for p, state in optimizer.state.items()}
    master = MasterWeights([_flat(params)], optimizer, is_elementwise=is_elementwise(optimizer))
    carry_state(master, client_state)
    for step in steps:
        for param, gradient in zip(params, _gradients(step), strict=True):
            assert param.grad is not None
            param.grad.add_(gradient)
        master.step(factor)
    return master


def _plain(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range, factor: float) -> None:
    for step in steps:
        for param, gradient in zip(params, _gradients(step), strict=True):
            param.grad = gradient * factor
        optimizer.step()


@pytest.fixture(autouse=True)
def _small_sub_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(master_module.SUB_GROUP_NUMEL, "cpu", 16)  # several sub-groups although the model is tiny


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_each_optimizer_takes_the_steps_of_plain_torch(name: str, factor: float) -> None:
    wanted, got = _parameters(), _parameters()
    _plain(wanted, OPTIMIZERS[name](wanted), range(3), factor)
    _walk(got, OPTIMIZERS[name](got), range(3), factor)
    for ours, theirs in zip(got, wanted, strict=True):  # fp64: the factor is a power of two, so at most the kernels differ
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_client_optimizer_comes_back_with_its_state_and_trains_on_in_plain_torch(name: str) -> None:
    wanted, got = _parameters(), _parameters()
    plain, ours = OPTIMIZERS[name](wanted), OPTIMIZERS[name](got)
    _plain(wanted, plain, range(4), 0.5)
    _plain(got, ours, range(1), 0.5)
    hand_back(_walk(got, ours, range(1, 3), 0.5))
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(p) for p in got]
    _plain(got, ours, range(3, 4), 0.5)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


def _steps_of_fused(name: str, sub_group_numel: int | None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(5000, generator=generator))
    flat = flat_group([("w", param)], dtype=torch.float32)
    flat.attach_gradients(ViewGradients(flat, LocalReducer(flat.layout.numel, torch.float32, CPU)))
    master = MasterWeights([flat], FUSED[name]([param]), is_elementwise=True, sub_group_numel=sub_group_numel)
    for _ in range(5):
        assert param.grad is not None
        param.grad.add_(torch.randn(5000, generator=generator))
        master.step(1.0)
    return param.detach().clone()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("numel", [100, 333, 777])
def test_torchs_kernels_give_the_same_bits_in_sub_groups_of_any_size(
    name: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(master_module.SUB_GROUP_NUMEL, "cpu", 1 << 19)
    assert torch.equal(_steps_of_fused(name, numel), _steps_of_fused(name, None))
