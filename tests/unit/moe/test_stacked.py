"""Stacked experts are told by their structure, and computed in one product or one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed.moe.stacked import NotStackedError, grouped_product, looped_product, run_experts, stacks_of
from deepspeed.ops import host_products

WIDTH, INNER, EXPERTS = 6, 5, 4


class Stack(nn.Module):
    """Experts with a gate, as Hugging Face's library lays them out."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, INNER, dtype=torch.float64))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for choice in range(top_k_index.shape[1]):
            for token, expert in enumerate(top_k_index[:, choice].tolist()):
                gate, up = (self.gate_up_proj[expert] @ hidden_states[token]).chunk(2)
                out[token] += (self.down_proj[expert] @ (self.act_fn(gate) * up)) * top_k_weights[token, choice]
        return out


class Plain(Stack):
    """Without a gate, weights (in, out), with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.is_transposed = True
        del self.gate_up_proj
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH, dtype=torch.float64))
        self.up_proj_bias = nn.Parameter(torch.randn(EXPERTS, INNER, dtype=torch.float64))
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH, dtype=torch.float64))


def test_the_layout_is_read_from_the_shapes() -> None:
    stacks = stacks_of(Stack())
    assert (stacks.first, stacks.last, stacks.num_experts) == ("gate_up_proj", "down_proj", EXPERTS)
    assert (stacks.is_transposed, stacks.has_gate, stacks.is_published) == (False, True, False)
    assert stacks.arguments == ("hidden_states", "top_k_index", "top_k_weights")
    plain = stacks_of(Plain())
    assert (plain.first, plain.is_transposed, plain.has_gate) == ("up_proj", True, False)


def test_without_a_gate_a_module_must_say_which_way_its_weights_lie() -> None:
    module = Plain()
    del module.is_transposed
    with pytest.raises(NotStackedError, match="set is_transposed"):
        stacks_of(module)
    module.is_transposed = False
    assert not stacks_of(module).is_transposed


def test_a_sharded_module_is_known_by_the_shapes_that_its_parameters_publish() -> None:
    module = Stack()
    for param in module.parameters():
        param.ds_shape = param.shape  # type: ignore[attr-defined]
        param.data = torch.empty(0, dtype=param.dtype)
    assert stacks_of(module) == stacks_of(Stack())


def test_each_expert_computes_its_own_rows_with_weights_and_biases() -> None:
    module, rows_per_expert = Plain(), [2, 0, 3, 1]
    rows_XM = torch.randn(6, WIDTH, dtype=torch.float64)
    got = run_experts(module, stacks_of(module), rows_XM, rows_per_expert, is_grouped=True)
    of_row = [expert for expert, rows in enumerate(rows_per_expert) for _ in range(rows)]
    for row, expert in enumerate(of_row):
        inner = module.act_fn(rows_XM[row] @ module.up_proj[expert] + module.up_proj_bias[expert])
        want = inner @ module.down_proj[expert] + module.down_proj_bias[expert]
        torch.testing.assert_close(got[row], want, rtol=1e-13, atol=1e-13)
    got.square().sum().backward()
    for param in module.parameters():
        assert param.grad is not None
        assert param.grad[1].abs().sum() == 0
        assert param.grad[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_grouped_product_is_the_loop(dtype: torch.dtype, is_transposed: bool) -> None:
    rows_per_expert = [5, 0, 2]
    found = []
    for product in (grouped_product, looped_product):
        torch.manual_seed(0)
        rows = torch.randn(7, 16, dtype=dtype, requires_grad=True)
        slabs = torch.randn(3, 16, 24, dtype=dtype) if is_transposed else torch.randn(3, 24, 16, dtype=dtype)
        slabs.requires_grad_()
        result = product(rows, slabs if is_transposed else slabs.transpose(1, 2), rows_per_expert)
        (result * torch.linspace(-1, 1, 24, dtype=dtype)).sum().backward()
        found.append((result, rows.grad, slabs.grad))
    for grouped, looped in zip(*found, strict=True):  # bf16: sums of 16 and 24 terms are rounded once or more often
        torch.testing.assert_close(grouped, looped, rtol=4 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_large_products_on_the_cpu_round_otherwise_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_slow in (False, True):
        monkeypatch.setattr(host_products, "is_mkl_slow", lambda is_slow=is_slow: is_slow)
        torch.manual_seed(0)
        rows, slabs = torch.randn(130, 256, requires_grad=True), torch.randn(2, 512, 256, requires_grad=True)
        result = looped_product(rows, slabs.transpose(1, 2), [65, 65])
        (result * torch.linspace(-1, 1, 512)).sum().backward()
        found.append((result, rows.grad, slabs.grad))
    for plain, fast in zip(*found, strict=True):  # sums of 65 to 512 terms of size 1, rounded at 6e-8 each
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-4)


def test_products_follow_autocast() -> None:
    module = Stack().float()
    with torch.autocast("cpu", torch.bfloat16):
        got = run_experts(module, stacks_of(module), torch.randn(4, WIDTH), [1, 1, 1, 1], is_grouped=False)
    assert got.dtype == torch.bfloat16


class NotOfExperts(Stack):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return hidden_states


def _changed(**attributes: Any) -> nn.Module:
    module = Stack()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _with_buffer() -> nn.Module:
    module = Stack()
    module.register_buffer("seen", torch.zeros(EXPERTS))
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.ModuleList([nn.Linear(2, 2)]), "one module per expert"),
        (nn.Linear(2, 2), "no three-dimensional parameter 'gate_up_proj'"),
        (NotOfExperts(), r"forward\(hidden_states\)"),
        (_changed(num_experts=3), "num_experts=3"),
        (_changed(post_expert_norm=nn.LayerNorm(WIDTH)), "not stacked weights or biases.*post_expert_norm.weight"),
        (_changed(down_proj=nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER + 1))), "do not follow each other"),
        (_changed(_is_expert_parallel=True), "Hugging Face's own expert parallelism"),
        (_changed(act_fn=None), "no activation"),
        (_with_buffer(), "has buffers"),
    ],
)
def test_what_cannot_be_spread_says_why(module: nn.Module, reason: str) -> None:
    with pytest.raises(NotStackedError, match=reason):
        stacks_of(module)


def test_other_names_of_the_weights_are_taken() -> None:
    module = Stack()
    module.w13, module.w2 = module.gate_up_proj, module.down_proj
    del module.gate_up_proj, module.down_proj
    stacks = stacks_of(module, "w13", "w2")
    assert (stacks.first, stacks.last) == ("w13", "w2")


def test_a_module_with_its_own_gate_uses_it() -> None:
    module = Stack()
    module._apply_gate = lambda inner: F.relu(inner[..., ::2]) * inner[..., 1::2]  # type: ignore[assignment]
    rows = torch.randn(1, WIDTH, dtype=torch.float64)
    got = run_experts(module, stacks_of(module), rows, [1, 0, 0, 0], is_grouped=False)
    inner = module.gate_up_proj[0] @ rows[0]
    want = module.down_proj[0] @ (F.relu(inner[::2]) * inner[1::2])
    torch.testing.assert_close(got[0], want, rtol=1e-13, atol=1e-13)
