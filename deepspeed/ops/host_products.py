"""fp32 matrix products in host memory by the faster of torch's two libraries.

    with fast_products(device):          F.linear(x, w, b), large, fp32, on the CPU
        expert(rows)                       -> oneDNN: forward, and both products of backward
                                         anything else, anywhere else -> as ever

torch multiplies fp32 matrices on a CPU by MKL, which uses AVX-512 on processors of its maker alone; oneDNN, which torch
ships too, uses it wherever it is. On such a processor the products take half the time (`benchmarks/moe_layer.py`). Both
round to fp32 and add in their own order. Where MKL is fast, or oneDNN missing or switched off, nothing is replaced.

[Note: hooks that begin inside] A recomputation that begins inside the block (`torch.utils.checkpoint` around a part of an
expert) runs again in backward, outside of it, and puts what autograd saves then in the places of what it saved before, one
by one. `addmm` saves the transposed weight, the replacement does not, so both runs must take the same one: where other hooks
on saved tensors are in force than at the beginning of the block, nothing is replaced. A recomputation around the block does
all of it again. Our own (`activations.segment`) asks `repeated` for a block that both runs enter.

Lives here: the replacement and the question whether it pays. Called by the engines around forward, by `activations.segment`,
by `moe.experts` and `moe.stacked`, whose rows come together inside, and by `pipe.late_weights` for single products.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from deepspeed.common.saved_tensors import outer_hooks

__all__ = ["fast_products", "is_mkl_slow", "linear", "may_pay", "product", "repeated"]

_LEAST_PRODUCTS = 1 << 22
"""Multiply-adds below which the call costs more than it saves."""

_LEAST_WEIGHT_NUMEL = 1 << 14
"""Elements of a weight below which few batches reach that."""

_PLAIN = (Tensor, nn.Parameter)  # other classes have a `F.linear` of their own


@functools.cache
def is_mkl_slow() -> bool:
    """Whether torch multiplies by an MKL that leaves out AVX-512 here, and has a oneDNN that uses it."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_both or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and _maker() not in (None, "GenuineIntel")


def may_pay(weights: Iterable[tuple[Sequence[int], torch.dtype]], device: torch.device) -> bool:
    """Whether `fast_products` may be of use to layers with such weights, (shape, dtype) each: it costs a little per call."""
    return device.type == "cpu" and is_mkl_slow() and any(_is_large(*weight) for weight in weights)


def _is_large(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and len(shape) == 2 and math.prod(shape) >= _LEAST_WEIGHT_NUMEL  # a matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with its gradients, by the faster library."""
    if is_mkl_slow() and _may_replace() and _is_suited(x, weight, bias):
        output: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return output
    return F.linear(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` without a gradient, by the faster library."""
    if is_mkl_slow() and _may_replace() and _is_suited(x, weight, bias):
        flat = _product(x.reshape(-1, x.shape[-1]), weight, bias)
        product: Tensor = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], weight.shape[0]))
        return product  # no view: what follows may change it in place, as it may torch's own (nn.ReLU(inplace=True))
    return F.linear(x, weight, bias)


def _maker(info: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's maker as Linux tells it; None where it does not."""
    if sys.platform != "linux" or not info.exists():
        return None
    lines = (line.partition(":") for line in info.read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "vendor_id"), None)


def fast_products(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """While in force, `F.linear` of large fp32 matrices runs on oneDNN if that pays here; backward later does likewise."""
    if torch.compiler.is_compiling() or device.type != "cpu" or not is_mkl_slow():
        return contextlib.nullcontext()
    return _ByOneDnn()


def repeated() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Makes the context in which products are as they are now, for a function that runs now and again later."""
    return _ByOneDnn if _blocks.entered else contextlib.nullcontext


class _Blocks(threading.local):
    entered = 0


_blocks = _Blocks()


class _ByOneDnn(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._hooks = outer_hooks()

    def __enter__(self) -> TorchFunctionMode:
        _blocks.entered += 1
        entered: TorchFunctionMode = super().__enter__()  # type: ignore[no-untyped-call]
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _blocks.entered -= 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # The last: [Note: hooks that begin inside].
        if func is F.linear and not kwargs and _may_replace() and _is_suited(*args) and outer_hooks() == self._hooks:
            return _Linear.apply(args[0], args[1], args[2] if len(args) > 2 else None)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _may_replace() -> bool:
    """Whether nothing is in force that asks for torch's own product."""
    return (
        not torch.compiler.is_compiling()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and _watchers_know_products()
        and forward_ad._current_level < 0
    )


def _watchers_know_products() -> bool:
    """Whoever watches operators knows torch's own; few say that they know those that stand in for them, too."""
    watchers = range(torch._C._len_torch_dispatch_stack())
    return all(getattr(torch._C._get_dispatch_stack_at(at), "knows_mkldnn_products", False) for at in watchers)


def _is_suited(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        all(_is_plain(tensor) for tensor in (x, weight, bias) if tensor is not None)
        and x.dim() > 1
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and x.numel() * weight.shape[0] >= _LEAST_PRODUCTS
    )


def _is_plain(tensor: Tensor) -> bool:
    is_dense = type(tensor) in _PLAIN and tensor.layout == torch.strided
    return is_dense and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class _Linear(torch.autograd.Function):
    """`F.linear` for (..., in), (out, in), (out,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        flat = _product(x.reshape(-1, x.shape[-1]), weight, bias)
        product: Tensor = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], weight.shape[0]))
        return product  # no view: what follows may change it in place, as it may torch's own (nn.ReLU(inplace=True))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: of operators that have one
            return _differentiable(gradient, x, weight, has_bias=ctx.needs_input_grad[2])
        gradient_RN = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_x = of_weight = None
        if weight is not None:
            of_x = _product(gradient_RN, weight.t(), None).view(*gradient.shape[:-1], weight.shape[1])
        if x is not None:
            of_weight = _product(gradient_RN.t(), x.reshape(-1, x.shape[-1]).t(), None)
        of_bias = gradient_RN.sum(dim=0) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


def _differentiable(
    gradient: Tensor, x: Tensor | None, weight: Tensor | None, *, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    gradient_RN = gradient.reshape(-1, gradient.shape[-1])
    of_x = None if weight is None else gradient @ weight
    of_weight = None if x is None else gradient_RN.t() @ x.reshape(-1, x.shape[-1])
    return of_x, of_weight, gradient_RN.sum(dim=0) if has_bias else None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`; either may be transposed in memory."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
