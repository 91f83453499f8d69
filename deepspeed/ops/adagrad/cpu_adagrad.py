"""DeepSpeedCPUAdagrad, on the kernels of `ops.host_step`; fp64 on torch's fused CPU kernel.

Source: Duchi, Hazan and Singer (JMLR 12, 2011), the diagonal form of figure 1.

Not here: Adagrad on a device, which is torch's own. Built by `optim.build` for offloaded state, and by clients.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from deepspeed.errors import UsageError
from deepspeed.ops.host_step import Adagrad
from deepspeed.ops.optimizer import Group, GroupOptimizer, ParamsT


class DeepSpeedCPUAdagrad(GroupOptimizer):
    """Adagrad on the CPU; state per parameter: `sum` (as torch.optim.Adagrad calls it) and `step`.

    Args:
        model_params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        eps: added to the root of the sum of squares.
        weight_decay: added to the gradient.
        amsgrad: not available.
        fp32_optimizer_states: keep the sum in float32 for 16-bit parameters; False gives it the parameter's dtype.

    Raises:
        RuntimeError: `amsgrad` was asked for.
        ValueError: a hyperparameter is outside its range.
    """

    state_keys: ClassVar[tuple[str, ...]] = ("sum",)
    host_only = True

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise UsageError("DeepSpeedCPUAdagrad was given amsgrad=True, which Adagrad does not have. Leave it out.")
        super().__init__(
            model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, fp32_states=fp32_optimizer_states
        )

    def host_rule(self, group: Group) -> Adagrad:
        """See `GroupOptimizer`."""
        return Adagrad(float(group["lr"]), group["weight_decay"], group["eps"])

    def _step_group(self, group: Group) -> None:
        for batch in self._batches(group):
            torch._foreach_add_(batch.steps, 1)
            torch._fused_adagrad_(
                batch.params,
                batch.grads,
                [total for (total,) in batch.states],
                batch.steps,
                lr=group["lr"],
                lr_decay=0.0,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            batch.write_back()
