"""DeepSpeedCPUAdam: Adam and AdamW for parameters and state in host memory.

Not here: the step (`base`). Built by `optim.build` for offloaded state, and by clients.
"""

from __future__ import annotations

from deepspeed.ops.adam.base import FusedKernelAdam
from deepspeed.ops.optimizer import ParamsT


class DeepSpeedCPUAdam(FusedKernelAdam):
    """Adam on the CPU; it may be built on a model elsewhere, but steps only on parameters that lie in host memory.

    Args:
        model_params: parameters, named parameters, or parameter groups.
        lr: learning rate.
        bias_correction: divide the moments by 1 - beta**step.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay of the parameters.
        amsgrad: not available.
        adamw_mode: decay the parameters themselves (AdamW); False adds the decay to the gradient (Adam with L2).
        fp32_optimizer_states: keep moments in float32 for 16-bit parameters; False gives them the parameter's dtype.

    Raises:
        RuntimeError: `amsgrad` was asked for.
        ValueError: a hyperparameter is outside its range.
    """

    host_only = True

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled=adamw_mode,
            fp32_states=fp32_optimizer_states,
        )
