"""Lion as one kernel launch. Not here: the class (`ops.lion`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from deepspeed.ops.device.table import BLOCK, NAMES, table_of

__all__ = ["lion_step"]


def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Update parameters and momenta in place; nothing waits for the device.

    Args:
        params: contiguous tensors on one device, fp32, bf16 or fp16, all of one dtype.
        grads: the same for gradients.
        momenta: the same for momenta.
        lr: learning rate.
        beta1: weight of the momentum in the update.
        beta2: decay of the momentum.
        weight_decay: decay of the parameters, decoupled.
    """
    table = table_of(params, grads, momenta)
    if not table.owners.numel():
        return
    kernels: Any = importlib.import_module("deepspeed.ops.device.kernels")
    kinds = [kernels.tl.dtype(NAMES[each[0].dtype]) for each in (params, grads, momenta)]
    numbers = (float(lr), 1.0 - float(lr) * weight_decay, 1.0 - beta1, 1.0 - beta2)
    kernels.lion_kernel[(table.owners.numel(),)](*table, *numbers, *kinds, BLOCK, enable_fp_fusion=False)
