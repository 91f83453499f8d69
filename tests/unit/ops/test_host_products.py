from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from deepspeed.ops import host_products
from deepspeed.ops.host_products import fast_products, is_mkl_slow

CPU = torch.device("cpu")
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture
def _paying(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where it pays."""
    if not HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(host_products, "is_mkl_slow", lambda: True)


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    product = host_products._product

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((*x.shape, weight.shape[0]))
        return product(x, weight, bias)

    monkeypatch.setattr(host_products, "_product", noted)
    return seen


@pytest.mark.usefixtures("_paying")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (4, 16)], ids=str)
def test_values_and_gradients_are_those_of_linear(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], with_bias: bool
) -> None:
    seen = _calls(monkeypatch)
    layer = nn.Linear(256, 512, bias=with_bias)
    x = torch.randn(*shape, 256, requires_grad=True)
    with fast_products(CPU):
        output = layer(x)
    gradient = torch.randn(512).expand(*shape, 512)  # not contiguous
    given = [x, *layer.parameters()]
    got = torch.autograd.grad(output, given, gradient)
    assert seen == [(64, 256, 512), (64, 512, 256), (512, 64, 256)]
    exact = [each.detach().double().requires_grad_() for each in given]
    wanted = F.linear(*exact)
    # sums of up to 512 products of size 1: sqrt(512) * 2^-24 * a few
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-4)
    for one, two in zip(got, torch.autograd.grad(wanted, exact, gradient.double()), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("_paying")
@pytest.mark.parametrize("shape", [(64, 512), (4, 16, 512)])
def test_what_comes_out_may_be_changed_in_place(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    calls = _calls(monkeypatch)
    x, layer = torch.randn(shape), torch.nn.Linear(512, 256)
    with fast_products(CPU):
        torch.relu_(layer(x)).sum().backward()
    assert calls
    found, layer.weight.grad = layer.weight.grad, None
    torch.relu(layer(x)).sum().backward()
    torch.testing.assert_close(found, layer.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_paying")
def test_only_what_needs_a_gradient_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _calls(monkeypatch)
    layer = nn.Linear(256, 512).requires_grad_(False)
    x = torch.randn(64, 256, requires_grad=True)
    with fast_products(CPU):
        layer(x).sum().backward()
    assert seen == [(64, 256, 512), (64, 512, 256)]
    assert layer.weight.grad is None


@pytest.mark.usefixtures("_paying")
@pytest.mark.parametrize(
    "arguments",
    [
        (torch.ones(2, 8), torch.ones(4, 8)),
        (torch.ones(0, 256), torch.ones(512, 256)),
        (torch.ones(64, 256).double(), torch.ones(512, 256).double()),
        (torch.ones(64, 256).bfloat16(), torch.ones(512, 256).bfloat16()),
        (torch.ones(64, 256), torch.ones(512, 256).to_sparse()),
    ],
    ids=["small", "no rows", "float64", "bf16", "sparse"],
)
def test_other_products_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, arguments: tuple[Tensor, Tensor]) -> None:
    seen = _calls(monkeypatch)
    with fast_products(CPU):
        assert torch.equal(F.linear(*arguments), arguments[0] @ arguments[1].T)
    assert seen == []


@pytest.mark.usefixtures("_paying")
def test_outside_under_autocast_and_with_onednn_off_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _calls(monkeypatch)
    x, weight = torch.randn(64, 256), torch.randn(512, 256)
    F.linear(x, weight)
    with fast_products(CPU), torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16
    with fast_products(CPU), torch.backends.mkldnn.flags(enabled=False):
        F.linear(x, weight)
    with fast_products(torch.device("meta")):
        F.linear(x, weight)
    assert seen == []


@pytest.mark.usefixtures("_paying")
@pytest.mark.parametrize("shape", [(), (1,), (1, 512)], ids=str)
def test_a_bias_that_stands_for_several_is_added_to_each(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    seen = _calls(monkeypatch)
    x, weight, bias = torch.randn(64, 256), torch.randn(512, 256), torch.randn(shape, requires_grad=True)
    with fast_products(CPU):
        output = F.linear(x, weight, bias)
    assert torch.equal(output, F.linear(x, weight, bias))
    output.sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == shape
    assert seen == []


class Own(Tensor):
    """A tensor with a linear layer of its own."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return "its own" if func is F.linear else super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.usefixtures("_paying")
def test_classes_and_transforms_that_see_to_products_themselves_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _calls(monkeypatch)
    x, weight = torch.randn(64, 256), torch.randn(512, 256)
    with fast_products(CPU):
        assert F.linear(x, weight.as_subclass(Own)) == "its own"
        gradient = torch.func.grad(lambda each: F.linear(each, weight).sum())(x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(64, 256), rtol=1e-5, atol=1e-4)  # sums of 512
    assert seen == []


@pytest.mark.usefixtures("_paying")
def test_wrong_shapes_have_the_error_of_linear() -> None:
    with fast_products(CPU), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(torch.randn(64, 255), torch.randn(512, 256))


@pytest.mark.usefixtures("_paying")
@pytest.mark.parametrize("surrounds", [False, True])
def test_a_recomputation_takes_the_product_that_forward_took(monkeypatch: pytest.MonkeyPatch, surrounds: bool) -> None:
    """A square weight has the shape of its transpose: one in place of the other would be no error, but wrong gradients."""
    seen = _calls(monkeypatch)
    layer, x = nn.Linear(256, 256), torch.randn(64, 256, requires_grad=True)

    def run(rows: Tensor) -> Tensor:
        with fast_products(CPU):
            output: Tensor = layer(rows)
        return output

    if surrounds:
        output = checkpoint(run, x, use_reentrant=False)
    else:
        with fast_products(CPU):
            output = checkpoint(layer, x, use_reentrant=False)
    given, gradient = [x, *layer.parameters()], torch.randn(64, 256)
    got, wanted = (torch.autograd.grad(each, given, gradient) for each in (output, layer(x)))
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)  # sums of up to 256 products of size 1
    assert bool(seen) is surrounds


@pytest.mark.usefixtures("_paying")
@pytest.mark.parametrize("trained", ["x", "weight"])
def test_what_no_gradient_needs_is_not_kept(trained: str) -> None:
    x, weight = torch.randn(64, 256), torch.randn(512, 256)
    {"x": x, "weight": weight}[trained].requires_grad_()
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fast_products(CPU):
        output = F.linear(x, weight)
    output.sum().backward()
    assert kept == [(512, 256) if trained == "x" else (64, 256)]


@pytest.mark.parametrize(("vendor", "slow"), [("AuthenticAMD", True), ("GenuineIntel", False), (None, False)])
def test_mkl_is_slow_with_avx512_of_another_maker(monkeypatch: pytest.MonkeyPatch, vendor: str | None, slow: bool) -> None:
    if not HAS_ONEDNN or not torch.backends.mkl.is_available():
        pytest.skip("this torch lacks one of the two libraries")
    capability: Any = lambda: "AVX512"  # noqa: E731
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", capability)
    monkeypatch.setattr(host_products, "_maker", lambda: vendor)
    is_mkl_slow.cache_clear()
    try:
        assert is_mkl_slow() is slow
    finally:
        is_mkl_slow.cache_clear()


def test_the_maker_is_read_from_the_first_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: x\n\nprocessor\t: 1\n")
    assert host_products._maker(info) == "AuthenticAMD"
    info.write_text("processor\t: 0\n")
    assert host_products._maker(info) is None
    assert host_products._maker(tmp_path / "none") is None


@pytest.mark.usefixtures("_paying")
def test_a_second_derivative_is_that_of_linear() -> None:
    layer = nn.Linear(256, 512)
    x = torch.randn(64, 256, requires_grad=True)
    with fast_products(CPU):
        output = layer(x)

    def second(out: Tensor) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *layer.parameters()])

    for one, two in zip(second(output), second(F.linear(x, layer.weight, layer.bias)), strict=True):
        # fp32 on both sides, sums of 512 products thrice over: relative to the largest
        assert (one - two).abs().max() <= 1e-4 * two.abs().max()


@pytest.mark.usefixtures("_paying")
def test_what_watches_operators_sees_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _calls(monkeypatch)
    layer, x = nn.Linear(256, 512), torch.randn(64, 256)
    with fast_products(CPU), FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 64 * 256 * 512
    assert not seen


@pytest.mark.usefixtures("_paying")
def test_forward_derivatives_are_torchs_own() -> None:
    layer, x, tangent = nn.Linear(256, 512), torch.randn(64, 256), torch.randn(64, 256)
    with forward_ad.dual_level(), fast_products(CPU):
        got = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(got, F.linear(tangent, layer.weight))


@pytest.mark.usefixtures("_paying")
def test_it_pays_for_large_fp32_weights_alone() -> None:
    assert host_products.may_pay([((8,), torch.float32), ((256, 256), torch.float32)], CPU)
    assert not host_products.may_pay([((256, 256), torch.bfloat16), ((8, 8), torch.float32)], CPU)
    assert not host_products.may_pay([((256, 256), torch.float32)], torch.device("meta"))
