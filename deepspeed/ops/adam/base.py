"""The step that both Adam classes share.

    host memory, up to fp32    -> `ops.host_step`: all parameters in one call
    elsewhere, or fp64         -> one batch per group, device and dtype -> one call each of torch's fused kernel

Sources: Adam (arXiv:1412.6980) algorithm 1; AdamW (arXiv:1711.05101) algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.host_step import Adam
from deepspeed.ops.optimizer import Batch, Group, GroupOptimizer, HostWork, ParamsT


class FusedKernelAdam(GroupOptimizer):
    """Adam, or AdamW when `decoupled`; state per parameter: `exp_avg`, `exp_avg_sq` and `step`.

    As with torch's own fused optimizers, `grad_scale` and `found_inf` may be set as attributes before `step()`: float32
    tensors of one element on the parameters' device. Gradients are divided by `grad_scale` inside the kernel (and left
    divided); a `found_inf` of 1 leaves everything as it was. An absent attribute, or None, is neither.
    """

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _settings: ClassVar[tuple[str, ...]] = (*GroupOptimizer._settings, "adam_w_mode")
    kernel_is_exact = True
    _step_supports_amp_scaling = True  # the name torch.amp.GradScaler asks for

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
        set_grad_none: bool = True,
        fp32_states: bool = False,
    ) -> None:
        if amsgrad:
            raise UsageError(
                f"{type(self).__name__} was given amsgrad=True, which it does not have. "
                'Use torch.optim.Adam: in a config, "torch_adam": true beside "amsgrad".'
            )
        self.adam_w_mode = decoupled
        defaults: Group = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none, fp32_states=fp32_states)

    def host_rule(self, group: Group) -> Adam:
        """See `GroupOptimizer`."""
        beta1, beta2 = group["betas"]
        return Adam(
            float(group["lr"]),
            group["weight_decay"],
            beta1,
            beta2,
            group["eps"],
            is_decoupled=self.adam_w_mode,
            is_corrected=bool(group["bias_correction"]),
        )

    def _run_on_host(self, work: HostWork, keys: Sequence[Tensor], factor: float) -> None:
        host = torch.device("cpu")
        found_inf, grad_scale = self._attached("found_inf", host), self._attached("grad_scale", host)
        if found_inf is not None and found_inf.item() != 0:
            return
        if grad_scale is not None:
            torch._foreach_div_([grad for _, parts in work for grad in parts.grads], grad_scale.squeeze())
        super()._run_on_host(work, keys, factor)

    def _step_group(self, group: Group) -> None:
        for batch in self._batches(group):
            self._update(group, batch)

    def _update(self, group: Group, batch: Batch) -> None:
        device = batch.device
        torch._foreach_add_(batch.steps, 1)
        steps = batch.steps
        if not group["bias_correction"]:
            # After infinitely many steps both corrections, 1 - beta**step, are exactly 1.
            steps = [torch.full((), torch.inf, device=device)] * len(steps)
        grad_scale, found_inf = self._attached("grad_scale", device), self._attached("found_inf", device)
        beta1, beta2 = group["betas"]
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        kernel(
            batch.params,
            batch.grads,
            [exp_avg for exp_avg, _ in batch.states],
            [exp_avg_sq for _, exp_avg_sq in batch.states],
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(batch.steps, [found_inf.squeeze()] * len(batch.steps))
        batch.write_back()

    def _attached(self, name: str, device: torch.device) -> Tensor | None:
        tensor: Tensor | None = getattr(self, name, None)
        return None if tensor is None else tensor.to(device)
