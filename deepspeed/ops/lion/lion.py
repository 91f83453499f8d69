"""The Lion optimizer: the sign of an interpolated momentum, with decoupled weight decay.

    update   = sign(beta1 * m + (1 - beta1) * g)
    p        = p - lr * (update + weight_decay * p)
    m        = beta2 * m + (1 - beta2) * g

    host memory, up to fp32         one pass of `ops.host_step`
    devices that Triton knows       one kernel, `ops.device`
    elsewhere, and fp64             torch's calls on lists

Source: arXiv:2302.06675, algorithm 2.

Not here: masters and loss scale (the engine's business). Built by `optim.build`, and by clients.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from deepspeed.ops import device as device_kernels
from deepspeed.ops.host_step import Lion
from deepspeed.ops.optimizer import Group, GroupOptimizer, ParamsT


class _Lion(GroupOptimizer):
    """State per parameter: `exp_avg` and `step`."""

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def host_rule(self, group: Group) -> Lion:
        """See `GroupOptimizer`."""
        return Lion(float(group["lr"]), group["weight_decay"], *group["betas"])

    def _step_group(self, group: Group) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for batch in self._batches(group):
            momenta = [momentum for (momentum,) in batch.states]
            torch._foreach_add_(batch.steps, 1)
            if device_kernels.can_run(batch.device, batch.params[0].dtype):
                numbers = {"lr": float(lr), "beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"]}
                device_kernels.lion_step(batch.params, batch.grads, momenta, **numbers)
                batch.write_back()
                continue
            updates = torch._foreach_lerp(momenta, batch.grads, 1 - beta1)
            torch._foreach_sign_(updates)
            if group["weight_decay"]:
                torch._foreach_mul_(batch.params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(batch.params, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, batch.grads, 1 - beta2)
            batch.write_back()


class FusedLion(_Lion):
    """Lion on the device that holds the parameters.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        betas: weight of the momentum in the update, and decay of the momentum.
        weight_decay: decay of the parameters, decoupled from the update.
        set_grad_none: `zero_grad()` drops gradients instead of filling them with zeros.

    Raises:
        ValueError: a hyperparameter is outside its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        defaults: Group = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none=set_grad_none)


class DeepSpeedCPULion(_Lion):
    """Lion on the CPU; it may be built on a model elsewhere, but steps only on parameters that lie in host memory.

    Args:
        model_params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        betas: weight of the momentum in the update, and decay of the momentum.
        weight_decay: decay of the parameters, decoupled from the update.
        fp32_optimizer_states: keep the momentum in float32 for 16-bit parameters; False gives it the parameter's dtype.

    Raises:
        ValueError: a hyperparameter is outside its range.
    """

    host_only = True

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        defaults: Group = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(model_params, defaults, fp32_states=fp32_optimizer_states)
