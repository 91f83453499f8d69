"""FusedAdam: Adam and AdamW on the device that holds the parameters.

Not here: the step (`base`). Built by `optim.build`, and by clients.
"""

from __future__ import annotations

from deepspeed.ops.adam.base import FusedKernelAdam
from deepspeed.ops.optimizer import ParamsT


class FusedAdam(FusedKernelAdam):
    """Adam in one kernel call per parameter group.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay of the parameters.
        adam_w_mode: decay the parameters themselves (AdamW); False adds the decay to the gradient (Adam with L2).
        amsgrad: not available.
        set_grad_none: `zero_grad()` drops gradients instead of filling them with zeros.

    Raises:
        RuntimeError: `amsgrad` was asked for.
        ValueError: a hyperparameter is outside its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled=adam_w_mode,
            set_grad_none=set_grad_none,
        )
