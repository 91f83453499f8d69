"""Gradients of weights can wait: a linear layer's backward gives the gradient of its input at once, that of weights later.

    B     gradient of the output -> gradient of the input     the stage before waits for it
          (input, gradient of the output) are kept
    W     kept pairs -> gradient of weight and bias           nobody waits for it; it fills the bubble

The products are those of `F.linear` and its backward, by the faster of torch's libraries (`ops.host_products`). Gradients
are accumulated by autograd, so hooks see them as always. Layers that do not call `torch.nn.functional.linear` on a parameter
are computed whole in B, and so are those that are recomputed.

Source: zero-bubble pipelines (arXiv:2401.10241), section 2. Called by `engine.pipeline_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepspeed.ops.host_products import linear, product

__all__ = ["LateWeights"]

_Later = Callable[[], tuple[list[Tensor], list[Tensor]]]


class LateWeights(TorchFunctionMode):
    """While entered, `F.linear` with a trained leaf for weight leaves the gradients of weight and bias to `pay`.

    One object for one micro-batch in one chunk; entered in the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owed: list[_Later] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.linear or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_trained_leaf = weight.is_leaf and weight.requires_grad and (bias is None or bias.is_leaf)
        # Where no gradient of the input is wanted, nobody waits for this backward.
        if torch.is_autocast_enabled(input.device.type) or _is_hooked():
            return F.linear(input, weight, bias)
        if not (is_trained_leaf and input.requires_grad):
            return linear(input, weight, bias)
        apply: Callable[..., Tensor] = _Linear.apply
        return apply(input, _Layer(weight, bias, self._owed))

    def pay(self) -> None:
        """Compute and accumulate what the backward left; inside `reducer.drive`, as any backward.

        What is owed holds inputs of layers, these hold the graph, and that holds the list of what is owed: a ring that
        Python's collector does not see. So the list itself is emptied.
        """
        while self._owed:
            torch.autograd.backward(*self._owed.pop(0)())


def _is_hooked() -> bool:
    """Whether something else sees to what autograd keeps: a recomputation, which runs outside this mode, or an offload."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Layer(NamedTuple):
    """What the function computes with: no inputs of it, for autograd tells hooks of inputs whose gradient is None, too."""

    weight: Tensor
    bias: Tensor | None
    owed: list[_Later]


class _Linear(torch.autograd.Function):
    """As `F.linear`, with a backward of two halves."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: _Layer) -> Tensor:
        ctx.save_for_backward(input)
        ctx.layer = layer
        return product(input, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (input,), (weight, bias, owed) = ctx.saved_tensors, ctx.layer
        trained_bias = bias if bias is not None and bias.requires_grad else None
        owed.append(lambda: _of_weights(input, weight, trained_bias, grad))
        return product(grad, weight.t()), None


def _of_weights(input: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What `torch.autograd.backward` is to be called with."""
    rows_N, grads_N = input.reshape(-1, input.shape[-1]), grad.reshape(-1, grad.shape[-1])
    leaves, gradients = [weight.view_as(weight)], [product(grads_N.t(), rows_N.t())]
    if bias is not None:
        leaves.append(bias.view_as(bias))
        gradients.append(grads_N.sum(0))
    return leaves, gradients
