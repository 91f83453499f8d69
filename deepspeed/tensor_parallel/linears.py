"""What counts as a linear layer: `torch.nn.Linear` and classes of the same product, and transformers' `Conv1D`.

    nn.Linear    weight (out, in)    outputs along dimension 0
    Conv1D       weight (in, out)    outputs along dimension 1

Lives here: that question, and shapes. Classes that compute something else with such a weight do not count.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

__all__ = ["in_features", "input_dim", "is_linear", "out_features", "output_dim", "whole_shape"]

_SAME_PRODUCT = ("FalconLinear",)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is a linear layer; `Conv1D` too, which has no common class with the others.

    One whose weight is computed (`torch.nn.utils.parametrizations`, `weight_norm`) is none: there is nothing to cut.
    """
    if module._parameters.get("weight") is None:
        return False
    if isinstance(module, nn.Linear):
        kind = type(module)
        return kind.forward is nn.Linear.forward or kind.__name__ in _SAME_PRODUCT
    return is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`; asked without importing transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D" for kind in type(module).__mro__)


def output_dim(module: nn.Module) -> int:
    """Dimension of the weight that outputs lie along."""
    return 1 if is_transposed(module) else 0


def input_dim(module: nn.Module) -> int:
    """Dimension of the weight that inputs lie along."""
    return 1 - output_dim(module)


def whole_shape(module: nn.Module) -> tuple[int, int]:
    """Shape of the weight, as built."""
    weight = module._parameters["weight"]
    assert weight is not None  # a linear layer has one
    rows, columns = getattr(weight, "ds_shape", weight.shape)
    return int(rows), int(columns)


def out_features(module: nn.Module) -> int:
    """Width of what it gives."""
    return whole_shape(module)[output_dim(module)]


def in_features(module: nn.Module) -> int:
    """Width of what it takes."""
    return whole_shape(module)[input_dim(module)]
