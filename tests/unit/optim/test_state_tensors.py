"""State that an optimizer will keep, told before its first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.optim.state_tensors import state_tensors

_FP32 = torch.float32


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(5, 4))]


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        (DeepSpeedCPUAdam(_params()), {"exp_avg", "exp_avg_sq"}),
        (DeepSpeedCPUAdagrad(_params()), {"sum"}),
        (DeepSpeedCPULion(_params()), {"exp_avg"}),
        (torch.optim.AdamW(_params(), amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (torch.optim.AdamW(_params(), fused=True), {"exp_avg", "exp_avg_sq"}),
        (torch.optim.Adagrad(_params()), {"sum"}),
        (torch.optim.SGD(_params()), set()),
        (torch.optim.SGD(_params(), momentum=0.9), {"momentum_buffer"}),
        (torch.optim.RMSprop(_params(), momentum=0.9, centered=True), {"square_avg", "momentum_buffer", "grad_avg"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Optimizer) else "",
)
def test_the_state_is_that_of_a_first_step(optimizer: Optimizer, keys: set[str]) -> None:
    before = {id(p): dict(state) for p, state in optimizer.state.items()}
    found = state_tensors(optimizer, optimizer.param_groups[0], _FP32)
    assert found == dict.fromkeys(keys, _FP32)
    assert {id(p): dict(state) for p, state in optimizer.state.items()} == before  # left as it was
    (param,) = optimizer.param_groups[0]["params"]
    assert torch.equal(param.detach(), torch.ones(5, 4))
    param.grad = torch.ones_like(param)
    optimizer.step()
    made = {key for key, value in optimizer.state[param].items() if value is not None and value.shape == param.shape}
    assert made == keys


def test_state_dtypes_of_16_bit_parameters() -> None:
    optimizer = DeepSpeedCPUAdam(_params())
    group = optimizer.param_groups[0]
    assert set(state_tensors(optimizer, group, torch.bfloat16).values()) == {_FP32}
    assert set(state_tensors(optimizer, group, torch.bfloat16, state_dtype=torch.bfloat16).values()) == {torch.bfloat16}
    assert optimizer.state_dtype is None


def test_hooks_and_a_step_put_in_its_place_do_not_run() -> None:
    optimizer = torch.optim.AdamW(_params())
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran"))
    optimizer.step = lambda: pytest.fail("the replaced step ran")  # type: ignore[method-assign]
    assert set(state_tensors(optimizer, optimizer.param_groups[0], _FP32)) == {"exp_avg", "exp_avg_sq"}
