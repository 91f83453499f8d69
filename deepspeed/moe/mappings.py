"""Tokens that tensor-parallel ranks hold in common, each taking its part of them to the experts.

    x on every tensor-parallel rank --drop_tokens--> its own part --MoE--> --gather_tokens--> all of them again

For layers whose experts are whole on each tensor-parallel rank: without this every rank would compute the same. Clients call
them around `MoE`. With one tensor-parallel rank, or before there is a mesh, both return what they are given.
"""

from __future__ import annotations

from torch import Tensor

from deepspeed.comm import differentiable
from deepspeed.errors import ArgumentError
from deepspeed.topology import groups
from deepspeed.topology.mesh import AxisGroup

__all__ = ["drop_tokens", "gather_tokens"]


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Keep this tensor-parallel rank's part of `input_` along `dim`; backward gathers the parts' gradients.

    Every tensor-parallel rank must call it with the same `input_`.

    Raises:
        ArgumentError: the size along `dim` does not divide over those ranks.
    """
    axis = _tensor_axis()
    if axis is None:
        return input_
    if input_.shape[dim] % axis.size:
        raise ArgumentError(
            f"drop_tokens over {axis.size} tensor-parallel ranks: dimension {dim} has {input_.shape[dim]} elements, "
            f"which {axis.size} does not divide. Pad the tokens to a multiple of it."
        )
    return differentiable.split(input_, dim, axis.group)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Put the parts of all tensor-parallel ranks side by side along `dim`; backward keeps this rank's part of the gradient.

    Every tensor-parallel rank must call it with a part of the same shape.
    """
    axis = _tensor_axis()
    if axis is None:
        return input_
    return differentiable.gather(input_, dim, axis.group)


def _tensor_axis() -> AxisGroup | None:
    axis = groups.get_current().axis("tensor") if groups.has_current() else None
    return axis if axis is not None and axis.size > 1 else None
