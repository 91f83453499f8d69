"""The global norm of gradients, and scaling them down to a limit.

    norm   = (sum over parameters of |g|^p)^(1/p)        counted once per parameter, over model-parallel ranks too
    factor = min(1, max_norm / norm)                     1 when the norm is infinite or NaN

Gradients of a non-finite norm are left as they are: scaling would turn one infinity into NaN everywhere. The caller sees
the norm and skips the step. Nothing here waits for the device.

Source: Pascanu et al. (arXiv:1211.5063), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import ArgumentError

_TINY = 1e-6  # keeps the factor finite at norm 0; torch.nn.utils.clip_grad_norm_ adds the same


class ModelParallelUnit(Protocol):
    """The part of a client's `mpu` that says who holds pieces of the same model."""

    def get_model_parallel_rank(self) -> int:
        """This rank's place in its model-parallel group."""

    def get_model_parallel_group(self) -> Any:
        """That group."""


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2,
    mpu: ModelParallelUnit | None = None,
) -> Tensor:
    """Scale gradients in place so that their global norm is at most `max_norm`; return the norm before that.

    Args:
        parameters: whose gradients; those without one are passed over.
        max_norm: the limit, at least 0.
        norm_type: p of the norm; `math.inf` is the largest magnitude.
        mpu: with it the norm is that over the model-parallel group; every rank of the group must call.

    Returns:
        The norm, a 0-dim tensor of at least float32. When it is not finite, gradients were left alone.

    Raises:
        ArgumentError: `max_norm` is negative or NaN.
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = get_grad_norm(tensors, norm_type, mpu)
    factor = clip_factor(total, max_norm)
    for gradient in (p.grad for p in tensors):
        if gradient is not None:
            gradient.mul_(factor.to(gradient.device))
    return total


def clip_factor(total_norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of norm `total_norm` are multiplied by, on its device: at most 1, and 1 for a non-finite norm."""
    if not max_norm >= 0:
        raise ArgumentError(f"max_norm={max_norm!r}, but a number of at least 0 is needed.")
    factor = torch.clamp(max_norm / (total_norm + _TINY), max=1.0)
    return torch.where(torch.isfinite(total_norm), factor, 1.0)


def get_grad_norm(
    parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: ModelParallelUnit | None = None
) -> Tensor:
    """Global norm of gradients: a 0-dim tensor of at least float32, 0 without gradients. Arguments: `clip_grad_norm_`."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    counted = [p for p in tensors if mpu is None or mpu.get_model_parallel_rank() == 0 or is_model_parallel(p)]
    norms = [_norm(p.grad, norm_type) for p in counted if p.grad is not None and p.numel()]
    # The dtype follows the parameters, not the gradients there are: all ranks of a group must agree on it.
    is_double = any(p.dtype == torch.float64 for p in tensors)
    total = torch.zeros(
        (), dtype=torch.float64 if is_double else torch.float32, device=tensors[0].device if tensors else None
    )
    if norms:
        total = torch.linalg.vector_norm(torch.stack([norm.to(total) for norm in norms]), norm_type)
    if mpu is None:
        return total
    is_max = math.isinf(norm_type)
    total = total if is_max else total.pow(norm_type)
    comm.all_reduce(total, op=comm.ReduceOp.MAX if is_max else comm.ReduceOp.SUM, group=mpu.get_model_parallel_group())
    return total if is_max else total.pow(1 / norm_type)


def get_global_norm(norm_list: Iterable[float | Tensor]) -> float:
    """Norm of the whole from the L2 norms of its parts. Waits for the device where the parts are tensors."""
    return math.hypot(*(float(norm) for norm in norm_list))


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Norm of one gradient, 0-dim; 16-bit gradients are summed in float32, sparse ones over their values."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: Tensor = torch.linalg.vector_norm(values, norm_type, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm


MARKS_OF_PARTS = ("model_parallel", "tensor_model_parallel", "partition_dim", "partition_stride")
"""What Megatron-style code sets on parameters of which a rank holds a part."""


def is_model_parallel(p: Tensor) -> bool:
    """Whether model-parallel ranks hold different pieces of `p`; the marks are Megatron's."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))
