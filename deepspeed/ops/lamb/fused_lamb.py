"""The LAMB optimizer: Adam's update, scaled per parameter by a trust ratio.

    u     = m_hat / (sqrt(v_hat) + eps) + weight_decay * p
    ratio = clip(|p| / |u|, min_coeff, max_coeff)        1 where either norm is 0
    p     = p - lr * ratio * u

The norms are those of a whole parameter, so this optimizer is not element-wise: it must never be given slices.
Everything stays on the device; a step waits for nothing.

Source: arXiv:1904.00962, algorithm 2, with phi(z) = z. The clip of the ratio is not in the paper.

Not here: masters and loss scale (the engine's business). Built by `optim.build`, and by clients.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError, UsageError
from deepspeed.ops.optimizer import Batch, Group, GroupOptimizer, ParamsT, batches


class FusedLamb(GroupOptimizer):
    """LAMB; state per parameter: `exp_avg`, `exp_avg_sq` and `step`.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, or to the moment itself with `eps_inside_sqrt`.
        eps_inside_sqrt: add `eps` before taking the root.
        weight_decay: share of the parameter in the update.
        max_grad_norm: scale a group's gradients down to this global L2 norm; 0 leaves them.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        amsgrad: not available.

    Raises:
        RuntimeError: `amsgrad` was asked for.
        ValueError: a hyperparameter is outside its range.
    """

    elementwise: ClassVar[bool] = False
    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise UsageError("FusedLamb was given amsgrad=True, which it does not have. Leave it out.")
        if not 0 <= min_coeff <= max_coeff:
            raise ArgumentError(
                f"FusedLamb: min_coeff={min_coeff!r}, max_coeff={max_coeff!r}, but 0 <= min_coeff <= max_coeff is needed."
            )
        defaults: Group = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults, fp32_states=True)  # norms and ratios would drown in 16 bits
        self._coeffs: dict[int, list[Tensor]] = {}

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last step, in the order of the parameters that had a gradient. Waits for the device."""
        return [ratio for ratios in self._coeffs.values() for tensor in ratios for ratio in tensor.tolist()]

    def _step_group(self, group: Group) -> None:
        self._coeffs[id(group)] = [
            self._update(group, batch) for _, batch in batches(self._with_gradient(group), self.state_keys)
        ]

    def _update(self, group: Group, batch: Batch) -> Tensor:
        """Step one batch and return its trust ratios, shape (parameters,)."""
        torch._foreach_add_(batch.steps, 1)
        update = self._adam_update(group, batch)
        if group["weight_decay"]:
            torch._foreach_add_(update, batch.params, alpha=group["weight_decay"])
        weight_norms = torch.stack(torch._foreach_norm(batch.params))
        update_norms = torch.stack(torch._foreach_norm(update))
        usable = (weight_norms > 0) & (update_norms > 0)
        ratios = (weight_norms / update_norms).clamp(group["min_coeff"], group["max_coeff"])
        ratios = torch.where(usable, ratios, 1.0)
        torch._foreach_mul_(update, list(ratios.unbind()))
        torch._foreach_add_(batch.params, update, alpha=-group["lr"])
        batch.write_back()
        return ratios

    @staticmethod
    def _adam_update(group: Group, batch: Batch) -> list[Tensor]:
        """m_hat / (sqrt(v_hat) + eps) for each parameter, after taking the gradients into the moments."""
        beta1, beta2 = group["betas"]
        grads = _clipped(batch.grads, group["max_grad_norm"])
        exp_avgs = [exp_avg for exp_avg, _ in batch.states]
        exp_avg_sqs = [exp_avg_sq for _, exp_avg_sq in batch.states]
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
        update, denominators = exp_avgs, exp_avg_sqs
        if group["bias_correction"]:
            update = [m / _correction(beta1, step, m.dtype) for m, step in zip(exp_avgs, batch.steps, strict=True)]
            denominators = [v / _correction(beta2, step, v.dtype) for v, step in zip(exp_avg_sqs, batch.steps, strict=True)]
        eps = group["eps"]
        if group["eps_inside_sqrt"]:
            roots = torch._foreach_sqrt(torch._foreach_add(denominators, eps))
        else:
            roots = torch._foreach_add(torch._foreach_sqrt(denominators), eps)
        return list(torch._foreach_div(update, roots))


def _correction(beta: float, step: Tensor, dtype: torch.dtype) -> Tensor:
    """1 - beta**step, without the cancellation that would lose it in float32 and bfloat16."""
    exponent = step.to(torch.promote_types(dtype, torch.float32)) * (math.log(beta) if beta else -math.inf)
    return -torch.expm1(exponent)


def _clipped(grads: list[Tensor], max_norm: float) -> list[Tensor]:
    """`grads` scaled down to the global L2 norm `max_norm`; 0 leaves them."""
    if max_norm <= 0:
        return grads
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return list(torch._foreach_mul(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0)))
