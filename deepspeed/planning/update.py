"""Memory that exists while the optimizer steps: scratch of the walk (`zero.master`).

    in host memory, an optimizer with a kernel of its own    none: one pass reads gradients as they are
    elsewhere, gradients in the masters' format, factor 1    none: the optimizer works on views
    elsewhere                                                one sub-group of scaled gradients
    16-bit masters with state in fp32                        one sub-group of wide masters as well

Called by `states`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.parameter_tier import PlannedGroup
from deepspeed.engine.tiers import is_offloaded
from deepspeed.offload import placement
from deepspeed.ops.optimizer import GroupOptimizer
from deepspeed.optim.elementwise import is_elementwise
from deepspeed.precision.policy import DtypePolicy
from deepspeed.zero.master import fitting_numel

__all__ = ["scratch_nbytes"]


def scratch_nbytes(
    config: DeepSpeedConfig,
    policy: DtypePolicy,
    groups: Sequence[PlannedGroup],
    optimizer: Optimizer | None,
    device: torch.device,
) -> int:
    """Bytes of scratch on the device while it steps.

    Args:
        config: of the engine.
        policy: formats.
        groups: all flat groups.
        optimizer: of the model; None: nothing is trained.
        device: of the engine.
    """
    trained = [group for group in groups if group.kind.is_trained]
    if optimizer is None or not trained or (is_offloaded(config) and placement.is_host_apart(device)):
        return 0  # nothing steps on the device
    gradients = {policy.grad_accumulation_for(group.kind.param_dtype) for group in trained}
    masters = {group.kind.master_dtype for group in trained}
    dtypes = gradients | masters | {group.kind.param_dtype for group in trained}
    if isinstance(optimizer, GroupOptimizer) and optimizer.can_step_in_one_pass(device, *dtypes):
        return 0
    stepped = {torch.promote_types(each, policy.state or each) for each in masters}
    is_wide = stepped != masters
    has_factor = config.gradient_accumulation_steps > 1 or config.gradient_clipping > 0 or config.fp16.enabled
    if not (is_wide or has_factor or gradients != masters):
        return 0
    numel = sum(group.layout.shard_numel for group in trained)
    if is_elementwise(optimizer):
        numel = min(numel, fitting_numel(device), config.zero_optimization.sub_group_size)
    size = max(dtype.itemsize for dtype in stepped)
    return numel * size * (2 if is_wide else 1)
