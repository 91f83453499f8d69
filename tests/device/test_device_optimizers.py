"""FusedAdam, FusedLion and FusedLamb on a device against the same in fp64 on the CPU. Skipped where there is no device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import device as kernels
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion

SHAPES = ((3, 700), (5,), (), (2048,), (1_000_003,))
pytestmark = pytest.mark.skipif(get_accelerator().device_name() == "cpu", reason="needs an accelerator, and here is none")


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def test_triton_serves_the_devices_that_it_knows() -> None:
    assert kernels.can_run(_device(), torch.float32) is get_accelerator().is_triton_supported()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer_class", "numbers"),
    [
        (FusedAdam, {"weight_decay": 0.1}),
        (FusedLion, {"weight_decay": 0.1}),
        (FusedLamb, {"weight_decay": 0.1}),
        (FusedLamb, {"bias_correction": False, "eps_inside_sqrt": True, "max_grad_norm": 1.0}),
    ],
)
def test_three_steps_on_the_device_are_those_of_the_host_in_double(
    optimizer_class: type[torch.optim.Optimizer], numbers: dict[str, Any], dtype: torch.dtype
) -> None:
    starts = [torch.randn(shape).to(dtype) for shape in SHAPES]
    grads = [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(3)]
    here = [torch.nn.Parameter(start.to(_device())) for start in starts]
    wanted = [torch.nn.Parameter(start.double()) for start in starts]
    for parameters in (here, wanted):
        optimizer = optimizer_class(parameters, lr=1e-2, **numbers)
        for of_step in grads:
            for parameter, grad in zip(parameters, of_step, strict=True):
                parameter.grad = grad.to(parameter)
            optimizer.step()
    # A step moves an element by at most lr * (1 + decay) times Lamb's ratio of at most 10; it rounds the parameter, of up
    # to 5, once to its dtype, and, where Lion's momentum is rounded to bf16, may turn its sign over near 0.
    last = 5 * torch.finfo(dtype).eps
    for got, value in zip(here, wanted, strict=True):
        off = (got.detach().cpu().double() - value.detach()).abs()
        assert (off <= 3 * last + 1e-5).double().mean() > 0.999
        assert off.max() <= 3 * (2.2e-2 if optimizer_class is FusedLion else last + 1e-3)
