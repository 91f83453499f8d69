"""What hooks on saved tensors owe to autograd and to each other.

Under such hooks autograd does not look whether a saved tensor was changed in place, so whoever keeps the tensor itself looks
(`unchanged`). And hooks replace those that were in force before, so what one does not want it hands on (`outer_hooks`).
What an operation saves of its own output must not be kept as it is (`without_own_node`): the tensor holds its graph node,
which holds the tensor.

Called by `zero.saved`, `activations.keeping`, `moe.remaking` and `ops.host_products`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["Hook", "changed_in_place", "outer_hooks", "unchanged", "without_own_node"]

Hook = Callable[[Any], Any]

_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def outer_hooks() -> tuple[Hook, Hook] | None:
    """The (pack, unpack) in force on this thread now."""
    hooks: tuple[Hook, Hook] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """`tensor`, whose version was `version` when it was saved.

    Raises:
        UsageError: it was changed in place since.
    """
    if tensor._version != version:
        raise changed_in_place(
            f"a saved tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, not {version}"
        )
    return tensor


def without_own_node(tensor: Tensor) -> Tensor:
    """`tensor`, detached if the operation that saves it now made it: that node is the latest one."""
    node = tensor.grad_fn
    is_own = node is not None and node._sequence_nr() + 1 >= _next_sequence_number()
    return tensor.detach() if is_own else tensor


def changed_in_place(what: str) -> UsageError:
    """The error for values that gradients need and that are gone."""
    return UsageError(
        f"{what}: one of the variables needed for gradient computation has been modified by an inplace operation between "
        "forward and backward, so the gradients would be wrong. Run backward first, or clone the tensor before changing it."
    )
