"""Modules built without their weights, or straight in the dtype and on the device where they belong.

    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = build()                    # the shapes of the weights, and no memory

Lives here: the context. Does not live here: sharding while a model is built (`zero.Init`). Called by users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deepspeed.errors import ArgumentError

__all__ = ["OnDevice"]

_CONSTRUCTORS = frozenset((torch.empty, torch.full, torch.ones, torch.zeros))  # of weights: others make values that matter


class OnDevice(TorchFunctionMode):
    """Context in which `torch.empty`, `zeros`, `ones` and `full` make floating tensors of one dtype on one device.

    With "meta" those have no values. What other constructors make (`torch.arange` for positions, `torch.tensor`) keeps its
    values, dtype and device, as does what names a device.

    Args:
        dtype: of floating tensors, whatever dtype they ask for.
        device: where new tensors go that name no device.
        enabled: False changes nothing.

    Raises:
        ArgumentError: `dtype` is not a floating one.
    """

    def __init__(self, dtype: torch.dtype, device: str | int | torch.device = "meta", enabled: bool = True) -> None:
        super().__init__()
        if not dtype.is_floating_point:
            raise ArgumentError(f"OnDevice(dtype={dtype}): needed a floating dtype such as torch.bfloat16; pass one.")
        self.dtype = dtype
        self.device = torch.device(device)
        self.enabled = enabled

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if not self.enabled or func not in _CONSTRUCTORS or given.get("out") is not None:
            return func(*args, **given)
        if given.get("device") is None:
            given["device"] = self.device
        wanted = given.get("dtype")
        if wanted is not None and wanted.is_floating_point:
            given["dtype"] = self.dtype
        needs_grad = given.pop("requires_grad", False)
        made = func(*args, **given)
        return (made.to(self.dtype) if made.is_floating_point() else made).requires_grad_(needs_grad)
