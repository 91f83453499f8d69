"""FLOPs of single modules and functions, computed by hand from their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.ops import host_products
from deepspeed.profiling.flops_profiler import FlopsProfiler

B, S, M, H = 2, 5, 8, 2  # batch, length, width, heads
SCORES = B * H * S * S


def profile(model: nn.Module, *inputs: Tensor, backward: bool = False) -> FlopsProfiler:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    outputs: Any = model(*inputs)
    if backward:
        (outputs[0] if isinstance(outputs, tuple) else outputs).sum().backward()
    profiler.stop_profile()
    profiler.end_profile()
    return profiler


class Runs(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(64, 32))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, self.weight)


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(M, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x)[0]
        return y


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    # name: (module, shape of the input, MACs, other FLOPs)
    "linear": (lambda: nn.Linear(M, 16), (B, S, M), B * S * M * 16, 0),
    "linear without bias": (lambda: nn.Linear(M, 16, bias=False), (B, S, M), B * S * M * 16, 0),
    "convolution": (lambda: nn.Conv2d(3, 6, 3, padding=1), (B, 3, 8, 8), B * 8 * 8 * 6 * 3 * 9, 0),
    "strided, dilated": (lambda: nn.Conv2d(3, 6, 3, stride=2, dilation=2), (B, 3, 9, 9), B * 3 * 3 * 6 * 3 * 9, 0),
    "grouped": (lambda: nn.Conv1d(6, 12, 3, groups=3), (B, 6, 10), B * 8 * 12 * 2 * 3, 0),
    "three dimensions": (lambda: nn.Conv3d(2, 4, 2), (B, 2, 4, 4, 4), B * 27 * 4 * 2 * 8, 0),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (B, 4, 5, 5), B * 25 * 4 * 3 * 9, 0),
    "layer norm": (lambda: nn.LayerNorm(M), (B, S, M), 0, 7 * B * S * M),
    "layer norm, bare": (lambda: nn.LayerNorm(M, elementwise_affine=False), (B, S, M), 0, 5 * B * S * M),
    "batch norm": (lambda: nn.BatchNorm2d(3), (B, 3, 4, 4), 0, 7 * B * 3 * 16),
    "batch norm, evaluated": (lambda: nn.BatchNorm2d(3).eval(), (B, 3, 4, 4), 0, 4 * B * 3 * 16),
    "group norm": (lambda: nn.GroupNorm(2, 4), (B, 4, 3, 3), 0, 7 * B * 4 * 9),
    "gelu": (nn.GELU, (B, S, M), 0, B * S * M),
    "softmax": (lambda: nn.Softmax(dim=-1), (B, S, M), 0, 5 * B * S * M),
    "max pooling": (lambda: nn.MaxPool2d(2), (B, 3, 8, 8), 0, B * 3 * 16 * 4),
    "mean pooling": (lambda: nn.AvgPool2d(2), (B, 3, 8, 8), 0, B * 3 * 16 * 4),
    "two layers": (
        lambda: nn.Sequential(nn.Linear(M, 16), nn.ReLU(), nn.Linear(16, 4)),
        (B, M),
        B * (M * 16 + 16 * 4),
        B * 16,
    ),
    # Both layers have their gates, of 13 FLOPs per unit: docs of `products`.
    "lstm": (lambda: nn.LSTM(M, 6, 2), (S, B, M), S * B * 4 * 6 * (M + 6 + 6 + 6), 2 * S * B * 6 * 13),
    # Projections in and out; scores and values; q scaled, softmax; the mean of weights over heads.
    "attention": (
        SelfAttention,
        (B, S, M),
        B * S * M * 4 * M + 2 * SCORES * (M // H),
        B * S * 3 * M + B * S * M + 5 * SCORES + SCORES,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_counts_what_its_shapes_say(name: str) -> None:
    make, shape, macs, others = MODULES[name]
    profiler = profile(make(), _randn(*shape))
    assert (profiler.get_total_macs(), profiler.get_total_flops()) == (macs, 2 * macs + others)
    assert profiler.uncounted == {}


def test_lookups_cost_nothing() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    assert profile(nn.Embedding(10, 4), tokens).get_total_flops() == 0
    assert profile(nn.EmbeddingBag(10, 4), tokens).get_total_flops() == 3 * 4  # three rows added up


PRODUCTS = [
    lambda x, w: x @ w,
    torch.matmul,
    torch.mm,
    lambda x, w: torch.einsum("ij,jk->ik", x, w),
    lambda x, w: F.linear(x, w.t()),
    lambda x, w: torch.bmm(x[None], w[None]),
    lambda x, w: torch.baddbmm(torch.zeros(1, 16, 32), x[None], w[None]),
    lambda x, w: torch.addmm(torch.zeros(32), x, w),
    lambda x, w: torch.stack([x @ w[:, i] for i in range(32)], 1),
]


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_product_counts_the_same_however_it_is_written(number: int, mode: Callable[[], Any]) -> None:
    model = Runs(PRODUCTS[number])
    with mode():
        profiler = profile(model, _randn(16, 64))
    assert profiler.get_total_macs() == 16 * 64 * 32
    assert profiler.get_total_flops() == 2 * 16 * 64 * 32


def _attention(causal: bool, heads: int) -> Callable[..., Tensor]:
    return lambda q, k, w: F.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=heads != 4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_counts_two_products_and_its_softmax(causal: bool, heads: int) -> None:
    model = Runs(_attention(causal, heads))
    profiler = profile(model, _randn(2, 4, 10, 8), _randn(2, heads, 12, 8))
    scores = 2 * 4 * 10 * 12
    assert profiler.get_total_macs() == scores * (8 + 8)
    assert profiler.get_total_flops() == scores * (2 * 16 + 6)


def test_backward_of_attention_tells_what_its_kernel_computes_again() -> None:
    model = Runs(_attention(False, 4))
    q = _randn(2, 4, 10, 8).requires_grad_()
    profiler = profile(model, q, _randn(2, 4, 12, 8).requires_grad_(), backward=True)
    scores = 2 * 4 * 10 * 12
    sums_of_gradients = 2 * 4 * 12 * 8  # the key is the value, too
    assert profiler.get_total_backward_flops() == scores * (2 * 2 * 16 + 5) + sums_of_gradients
    assert profiler.get_total_recomputed_flops() == scores * (2 * 8 + 3)


@pytest.mark.parametrize("groups", [1, 3])
def test_backward_of_a_convolution_is_twice_its_forward(groups: int) -> None:
    model = nn.Conv2d(6, 12, 3, groups=groups, bias=False)
    profiler = profile(model, _randn(B, 6, 8, 8).requires_grad_(), backward=True)
    assert profiler.get_total_backward_flops() == 2 * profiler.get_total_flops()


def test_backward_of_a_layer_is_twice_its_forward_and_stands_with_the_layer() -> None:
    model = nn.Sequential(nn.Linear(M, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    profiler = profile(model, _randn(B, M).requires_grad_(), backward=True)
    root, first, middle, last = profiler.rows()
    assert (first.backward_flops, last.backward_flops) == (2 * first.flops, 2 * last.flops)
    assert middle.backward_flops == middle.flops == B * 16
    assert root.backward_flops == first.backward_flops + middle.backward_flops + last.backward_flops


def test_frozen_layers_and_inputs_without_gradients_cost_less_backward() -> None:
    model = nn.Sequential(nn.Linear(M, M, bias=False), nn.Linear(M, M, bias=False))
    model[1].requires_grad_(False)
    rows = profile(model, _randn(B, M), backward=True).rows()
    assert [row.backward_flops for row in rows[1:]] == [rows[1].flops, rows[2].flops]


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool, by_function: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(M, M, bias=False), nn.Tanh())
        self.outer = nn.Linear(M, M, bias=False)
        self.reentrant = reentrant
        self.function = (lambda x: F.linear(x, self.inner[0].weight).tanh()) if by_function else self.inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(checkpoint(self.function, x, use_reentrant=self.reentrant))
        return y


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by_function", [False, True])
def test_recomputation_is_counted_as_it_runs_and_apart(reentrant: bool, by_function: bool) -> None:
    model = Recomputed(reentrant, by_function)
    profiler = profile(model, _randn(B, M).requires_grad_(), backward=True)
    once = 2 * B * M * M
    assert profiler.get_total_flops() == 2 * once + B * M
    assert profiler.get_total_recomputed_flops() == once + B * M
    assert profiler.get_total_backward_flops() == 4 * once + B * M
    if not by_function:
        inner = next(row for row in profiler.rows() if row.path == "inner")
        assert (inner.again_flops, inner.backward_flops) == (once + B * M, 2 * once + B * M)


def test_second_derivatives_are_backward() -> None:
    model = nn.Linear(M, M, bias=False)
    x = _randn(B, M).requires_grad_()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    profiler.stop_profile()
    profiler.end_profile()
    assert gradient.shape == x.shape
    assert (profiler.get_total_backward_flops(), profiler.get_total_recomputed_flops()) == (2 * B * M * M, 0)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(100, 100, bias=False)
        self.b = self.c = self.a
        self.inside = nn.Sequential(self.a, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inside(self.c(self.b(self.a(x))))
        return y


def test_each_use_of_a_shared_module_counts_and_its_parameters_once() -> None:
    profiler = profile(Shared(), _randn(1, 100))
    rows = {row.path: row for row in profiler.rows()}
    assert profiler.get_total_flops() == 4 * 2 * 100 * 100 + 100
    assert profiler.get_total_params() == 100 * 100
    assert (rows["a"].flops, rows["a"].calls) == (3 * 20000, 3)  # three calls from the model itself
    assert (rows["inside"].flops, rows["inside.0"].flops) == (20100, 20000)
    assert rows["inside.0"].is_repeat
    assert rows["inside.0"].params == 0


def test_repeated_profiles_are_equal_and_leave_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(M, 16), nn.Tanh(), nn.Linear(16, 4))
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    counts = {profile(model, _randn(B, M)).get_total_flops() for _ in range(3)}
    assert len(counts) == 1
    assert torch._C._len_torch_dispatch_stack() == 0
    for name, module in model.named_modules():
        assert set(module.__dict__) == set(before[name])
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_gradients_that_accumulate_are_not_the_models() -> None:
    model = nn.Linear(M, M, bias=False)
    x = _randn(B, M)
    first = profile(model, x, backward=True).get_total_backward_flops()
    assert profile(model, x, backward=True).get_total_backward_flops() == first == 2 * B * M * M


def test_products_that_run_on_onednn_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(host_products, "is_mkl_slow", lambda: True)
    model, x = nn.Linear(512, 512), _randn(32, 512).requires_grad_()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with host_products.fast_products(torch.device("cpu")):
        output = model(x)
    assert type(output.grad_fn).__name__ == "_LinearBackward"  # the replacement ran
    output.sum().backward()
    profiler.stop_profile()
    profiler.end_profile()
    assert profiler.get_total_flops() == 2 * 32 * 512 * 512
    assert profiler.get_total_backward_flops() == 4 * 32 * 512 * 512 + 32 * 512  # and the sum for the bias


def test_what_has_no_formula_is_named() -> None:
    profiler = profile(Runs(lambda x, w: torch.linalg.inv(x)), torch.eye(4))
    assert profiler.get_total_flops() == 0
    assert any("inv" in name for name in profiler.uncounted)
