"""fp32 matrix products in host memory by the faster of torch's two libraries.

    with fast_products(device):          F.linear(x, w, b), large, fp32, on the CPU
        expert(rows)                       -> oneDNN: forward, and both products of backward
                                         anything else, anywhere else -> as ever

torch multiplies fp32 matrices on a CPU by MKL, which uses AVX-512 on processors of its maker alone; oneDNN, which torch
ships too, uses it wherever it is. On such a processor the products take half the time (`benchmarks/moe_layer.py`). Both
round to fp32 and add in their own order. Where MKL is fast, or oneDNN missing or switched off, nothing is replaced.

Lives here: the replacement and the question whether it pays. Called by `moe.experts` and `moe.stacked`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

__all__ = ["fast_products", "is_mkl_slow"]

_LEAST_PRODUCTS = 1 << 22
"""Multiply-adds below which the call costs more than it saves."""


@functools.cache
def is_mkl_slow() -> bool:
    """Whether torch multiplies by an MKL that leaves out AVX-512 here, and has a oneDNN that uses it."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_both or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and _maker() not in (None, "GenuineIntel")


def _maker(info: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's maker as Linux tells it; None where it does not."""
    if sys.platform != "linux" or not info.exists():
        return None
    lines = (line.partition(":") for line in info.read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "vendor_id"), None)


def fast_products(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """While in force, `F.linear` of large fp32 matrices runs on oneDNN if that pays here; backward later does likewise."""
    if device.type != "cpu" or not is_mkl_slow() or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return _ByOneDnn()


class _ByOneDnn(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and _is_suited(*args[:2]):
            return _Linear.apply(args[0], args[1], args[2] if len(args) > 2 else None)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _is_suited(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.dim() > 1
        and weight.dim() == 2
        and x.numel() * weight.shape[0] >= _LEAST_PRODUCTS
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    """`F.linear` for (..., in), (out, in), (out,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient_RN = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_x = _product(gradient_RN, weight.t(), None).view_as(x) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = _product(gradient_RN.t(), x.reshape(-1, x.shape[-1]).t(), None)
        of_bias = gradient_RN.sum(dim=0) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`; either may be transposed in memory."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
