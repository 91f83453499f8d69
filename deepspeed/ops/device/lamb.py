"""LAMB as three kernel launches, the trust ratios between the second and third. Not here: the class (`ops.lamb`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.device.table import BLOCK, NAMES, table_of

__all__ = ["lamb_apply", "lamb_update"]


def lamb_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    corrections_T2: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    is_eps_inside: bool,
) -> tuple[list[Tensor], Tensor]:
    """Take the gradients into the moments, in place, and compute the updates; nothing waits for the device.

    Args:
        params: contiguous tensors on one device, fp32, bf16 or fp16, all of one dtype.
        grads: the same for gradients.
        exp_avgs: the same for first moments.
        exp_avg_sqs: for second moments, of the first's dtype.
        corrections_T2: what the moments of each tensor are divided by, fp32.
        beta1: decay of the first moment.
        beta2: decay of the second.
        eps: added to the root of the second moment, or inside it.
        weight_decay: share of the parameter in the update.
        is_eps_inside: whether `eps` is added inside the root.

    Returns:
        The updates, fp32, in the shapes of `params`; and sums of squares of each parameter and update, fp64 (tensors, 2).
    """
    kernels: Any = importlib.import_module("deepspeed.ops.device.kernels")
    device = params[0].device
    updates_F = torch.empty(sum(each.numel() for each in params), device=device)
    updates = list(torch.split(updates_F, [each.numel() for each in params]))
    table = table_of(params, grads, exp_avgs, exp_avg_sqs, updates)
    programs = table.owners.numel()
    partial_B2 = torch.empty(programs, 2, device=device)
    sums_T2 = torch.zeros(len(params), 2, dtype=torch.float64, device=device)
    if programs:
        kinds = [kernels.tl.dtype(NAMES[each[0].dtype]) for each in (params, grads, exp_avgs)]
        numbers = (1.0 - beta1, float(beta2), 1.0 - beta2, float(eps), float(weight_decay), bool(is_eps_inside))
        kernels.lamb_update_kernel[(programs,)](
            *table, corrections_T2.contiguous(), partial_B2, *numbers, *kinds, BLOCK, enable_fp_fusion=False
        )
        kernels.lamb_sums_kernel[(len(params),)](partial_B2, table.firsts, sums_T2, 256, enable_fp_fusion=False)
    return [update.view(param.shape) for update, param in zip(updates, params, strict=True)], sums_T2


def lamb_apply(params: Sequence[Tensor], updates: Sequence[Tensor], ratios_T: Tensor, lr: float) -> None:
    """Take `lr` * ratio * update from each parameter, in place.

    Args:
        params: as `lamb_update` was given.
        updates: what it returned.
        ratios_T: trust ratio of each tensor.
        lr: learning rate.
    """
    kernels: Any = importlib.import_module("deepspeed.ops.device.kernels")
    table = table_of(params, updates)
    if table.owners.numel():
        kind = kernels.tl.dtype(NAMES[params[0].dtype])
        kernels.lamb_apply_kernel[(table.owners.numel(),)](
            *table, ratios_T.float().contiguous(), float(lr), kind, BLOCK, enable_fp_fusion=False
        )
